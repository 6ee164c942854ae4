// Sends one request to several peers. Its body and the memory of its segments are stored once for all of them: in
// memory that peers of this host map, else in a copy. So no request waits until it has been sent, and no peer waits for
// another.
#include "python/multicast.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "memory/copy.h"
#include "memory/multicast_arena.h"
#include "python/calls.h"
#include "python/messages.h"
#include "python/signal_check.h"

using namespace nanobind::literals;

namespace telegrad::python {
namespace {

constexpr std::uint64_t kMinMulticast = 256 << 10;  // smaller ones are copied faster than they are mapped

/// Segments of a message in memory that does not change.
struct Stored {
  std::vector<OutSegment> segments;
  std::vector<std::shared_ptr<void>> memory;
  std::uint64_t size = 0;
};

/// Copies the memory of segments. Call it without the GIL.
Stored store(Engine& e, std::span<const std::int32_t> peers, const std::vector<OutSegment>& segments) {
  Stored stored;
  std::uint64_t small = 0;
  for (const OutSegment& s : segments) {
    std::shared_ptr<MulticastBuffer> buffer = s.size >= kMinMulticast ? e.allocate_multicast(peers, s.size) : nullptr;
    stored.segments.push_back({.data = buffer ? buffer->data() : nullptr, .size = s.size, .multicast = buffer.get()});
    stored.size += s.size;
    if (buffer) {
      stored.memory.push_back(std::move(buffer));
    } else {
      small += (s.size + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  std::shared_ptr<std::byte[]> rest(small > 0 ? new std::byte[small] : nullptr);
  std::byte* at = rest.get();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    OutSegment& s = stored.segments[i];
    std::byte* to = at;
    if (s.multicast) {
      to = s.multicast->data();
    } else {
      at += (s.size + kAlignment - 1) / kAlignment * kAlignment;
      s.data = to;
    }
    copy_to_shared(to, segments[i].data, s.size, s.size < kNonTemporalSize);
  }
  if (rest) stored.memory.push_back(std::move(rest));
  return stored;
}

/// Returns the order of sending: peers that can take the request at once come first, so that no other peer delays them.
std::vector<std::size_t> order_of(Engine& e, std::span<const std::int32_t> peers, std::uint64_t size) {
  std::vector<std::size_t> order(peers.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_partition(order, [&](std::size_t i) { return e.may_send_now(peers[i], size); });
  return order;
}

bool start_many(Engine& e, const nb::list& peers, int tag, int flags, std::uint32_t name_id, nb::handle name,
                const nb::bytes& body, nb::handle segments, nb::handle metadata, const nb::list& epochs, Nanos timeout,
                std::uint32_t depth, bool never_wait, const nb::list& futures) {
  std::vector<std::int32_t> to;
  for (nb::handle peer : peers) to.push_back(nb::cast<std::int32_t>(peer));
  Stored stored;
  {
    const auto original = compose(tag, flags, body, segments);
    const GilReleased no_gil;
    stored = store(e, to, original->segments);
  }
  struct Request {
    std::unique_ptr<Outgoing> message;
    CallOptions options;
    std::uint64_t call = 0;
  };
  SignalCheck signals;
  std::vector<Request> requests(to.size());
  const Nanos deadline = deadline_after(now(), timeout);
  for (std::size_t i = 0; i < to.size(); ++i) {
    auto m = compose(tag, flags, body);
    auto& owner = static_cast<PyRefs&>(*m->owner);
    m->segments = stored.segments;
    for (const auto& memory : stored.memory) owner.hold(memory);
    if (!metadata.is_none()) {
      const auto own = nb::cast<nb::bytes>(metadata[i]);
      m->segments.push_back({reinterpret_cast<const std::byte*>(own.c_str()), own.size()});
      owner.add(own);
    }
    set_name(*m, name_id, name);
    m->immutable = true;
    m->epoch = nb::cast<std::int64_t>(epochs[i]);
    auto target = std::make_unique<PyRefs>();
    target->add(futures[i]);
    CallOptions& o = requests[i].options;
    o.deadline = deadline;
    o.nested = depth > 0;
    o.depth = depth;
    o.never_wait = never_wait;
    o.interrupted = signals.ask();
    o.target = std::move(target);
    requests[i].message = std::move(m);
  }
  {
    const GilReleased no_gil;
    for (const std::size_t i : order_of(e, to, stored.size)) {
      Request& r = requests[i];
      if (signals.raised()) {  // wait no more; send only what must be delivered
        if (!(r.message->header.flags & kMustDeliver)) break;
        r.options.never_wait = true;
      }
      r.call = e.start(to[i], std::move(r.message), std::move(r.options));
      if (e.stopping() && e.remove_completion(r.call)) r.call = 0;
    }
    stored.memory.clear();
  }
  std::optional<nb::python_error> interrupt;
  if (signals.raised()) interrupt.emplace();
  bool all = true;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& r = requests[i];
    release_message(r.message);
    all = all && r.call != 0;
    // Not in Python, which may run signal handlers before the next bytecode.
    if (r.call != 0) nb::setattr(futures[i], "_call", nb::int_(r.call));
  }
  requests.clear();
  decref_deferred();
  if (interrupt) throw nb::python_error(std::move(*interrupt));
  return all;
}

}  // namespace

void init_multicast(nb::class_<Engine>& engine) {
  engine.def(
      "start_many", start_many, "peers"_a, "tag"_a, "flags"_a, "name_id"_a, "name"_a.none(), "body"_a,
      "segments"_a.none(), "metadata"_a.none(), "epochs"_a, "timeout"_a, "depth"_a, "never_wait"_a, "futures"_a,
      nb::sig("def start_many(self, peers: list[int], tag: int, flags: int, name_id: int, name: object | None, "
              "body: bytes, segments: object | None, metadata: list[bytes] | None, epochs: list[int], "
              "timeout: int, depth: int, never_wait: bool, futures: list[typing.Any]) -> bool"),
      "Send one request to several peers, like `start`.\n\n"
      "The target of each is its future. Each request that is under way has set the `_call` of its future, even if a\n"
      "signal handler raises meanwhile. If there is metadata, a peer's own is its last segment. The segments'\n"
      "memory may change once this has returned, and no peer waits for another. Returns False if the engine has\n"
      "been stopped: some calls get no completion.");
}

}  // namespace telegrad::python

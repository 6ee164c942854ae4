// `_core.Engine`: the engine for Python. Every call that may wait or copy much does so without the GIL.
#include "core/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bind/block.h"
#include "bind/engine.h"
#include "bind/keep.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace telegrad::bind {
namespace {

constexpr std::uint64_t kSmall = 16 << 10;  // up to here a copy is cheaper than letting go of the GIL

std::string_view view(const nb::bytes& b) { return {b.c_str(), b.size()}; }

/// The thread that Python delivers signals to.
unsigned long main_thread() {
  static const unsigned long id =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  return id;
}

/// What the core asks while Python's main thread waits in it. Once a signal handler has raised, the exception is this
/// thread's: no more may be waited for.
class Interruption {
 public:
  std::function<bool()> ask() {
    if (PyThread_get_thread_ident() != main_thread()) return {};
    return [this] {
      nb::gil_scoped_acquire gil;
      raised_ = raised_ || PyErr_CheckSignals() != 0;
      return raised_;
    };
  }
  bool raised() const { return raised_; }

 private:
  bool raised_ = false;
};

/// `segments`: None, or a list of (address, size, owner) or bytes.
std::unique_ptr<Outgoing> compose(int tag, int flags, const nb::bytes& body, nb::handle segments, bool copy_small) {
  auto m = std::make_unique<Outgoing>();
  auto keep = std::make_unique<References>();
  m->header.tag = static_cast<std::uint8_t>(tag);
  m->header.flags = static_cast<std::uint16_t>(flags);
  m->body = view(body);
  keep->add(body);
  if (!segments.is_none()) {
    for (nb::handle s : nb::cast<nb::list>(segments)) {
      if (PyBytes_CheckExact(s.ptr())) {
        const auto bytes = nb::borrow<nb::bytes>(s);
        m->segments.push_back({reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()});
        keep->add(bytes);
        continue;
      }
      const auto t = nb::cast<nb::tuple>(s);
      m->segments.push_back(
          {reinterpret_cast<const std::byte*>(nb::cast<std::uintptr_t>(t[0])), nb::cast<std::uint64_t>(t[1])});
      keep->add(t[2]);
    }
    const std::uint64_t total = m->payload_size();
    if (copy_small && total <= kSmall) {
      keep->storage.reserve(total);
      for (auto& s : m->segments) {
        const char* at = keep->storage.data() + keep->storage.size();
        keep->storage.append(reinterpret_cast<const char*>(s.data), s.size);
        s.data = reinterpret_cast<const std::byte*>(at);
      }
    }
  }
  m->keep = std::move(keep);
  return m;
}

void set_name(Outgoing& m, std::uint32_t id, nb::handle name) {
  if (id == 0) return;
  const auto text = nb::cast<nb::bytes>(name);
  m.header.name_id = id;
  m.name = view(text);
  static_cast<References&>(*m.keep).add(text);
}

nb::tuple outcome_tuple(Outcome&& o) {
  nb::object why = o.why.empty() ? nb::none() : nb::object(nb::str(o.why.c_str(), o.why.size()));
  return nb::make_tuple(static_cast<int>(o.status), o.reply.header.tag, o.reply.header.flags,
                        body_object(std::move(o.reply.body)), segment_list(std::move(o.reply.segments)), o.peer, why);
}

nb::object name_object(const std::shared_ptr<const Name>& name) {
  if (!name) return nb::none();
  if (!name->handle) {  // the GIL guards it
    auto* keep = new References;
    keep->add(nb::bytes(name->text.data(), name->text.size()));
    name->handle = std::shared_ptr<void>(keep, [](void* p) { delete static_cast<References*>(p); });
  }
  return nb::borrow(static_cast<References*>(name->handle.get())->front());
}

Nanos deadline_of(Nanos timeout) { return deadline_after(now(), timeout); }

nb::tuple call(Engine& e, std::int32_t peer, int tag, int flags, std::uint32_t name_id, nb::handle name,
               const nb::bytes& body, nb::handle segments, Nanos timeout, bool nested, nb::handle linger) {
  auto m = compose(tag, flags, body, segments, false);
  set_name(*m, name_id, name);
  CallOptions o;
  o.deadline = deadline_of(timeout);
  o.nested = nested;
  if (!linger.is_none()) {
    auto keep = std::make_unique<References>();
    keep->add(linger);
    o.linger = std::move(keep);
  }
  const Nanos deadline = o.deadline;
  Interruption interruption;
  const auto interrupted = o.interrupted = interruption.ask();
  Outcome outcome;
  WaitEnd end;
  {
    nb::gil_scoped_release no_gil;
    const std::uint64_t id = e.start(peer, std::move(m), std::move(o));
    end = interruption.raised() ? WaitEnd::kInterrupted : e.wait(id, deadline, interrupted, outcome);
    if (end != WaitEnd::kDone) e.give_up(id);
  }
  release_references();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  if (end == WaitEnd::kDeadline) outcome.status = CallStatus::kTimedOut;
  if (end == WaitEnd::kStopped) outcome.status = CallStatus::kStopped;
  outcome.peer = peer;
  return outcome_tuple(std::move(outcome));
}

std::uint64_t start(Engine& e, std::int32_t peer, int tag, int flags, std::uint32_t name_id, nb::handle name,
                    const nb::bytes& body, nb::handle segments, Nanos timeout, bool nested, bool never_wait,
                    nb::handle cookie, nb::handle linger) {
  auto m = compose(tag, flags, body, segments, true);
  set_name(*m, name_id, name);
  CallOptions o;
  o.deadline = deadline_of(timeout);
  o.nested = nested;
  auto keep = std::make_unique<References>();
  keep->add(cookie);
  o.cookie = std::move(keep);
  if (!linger.is_none()) {
    keep = std::make_unique<References>();
    keep->add(linger);
    o.linger = std::move(keep);
  }
  const std::uint64_t size = m->payload_size();
  const bool small = size <= kSmall;
  o.never_wait = never_wait || (small && e.may_send_now(peer, size));
  if (o.never_wait && !small) {  // nobody will wait until the memory has left: take it along
    auto& storage = static_cast<References&>(*m->keep).storage;
    storage.reserve(size);
    for (auto& s : m->segments) {
      const char* at = storage.data() + storage.size();
      storage.append(reinterpret_cast<const char*>(s.data), s.size);
      s.data = reinterpret_cast<const std::byte*>(at);
    }
  }
  std::uint64_t id;
  Interruption interruption;
  o.interrupted = interruption.ask();
  if (o.never_wait) {
    id = e.start(peer, std::move(m), std::move(o));
  } else {
    nb::gil_scoped_release no_gil;
    id = e.start(peer, std::move(m), std::move(o));
  }
  release_references();
  if (interruption.raised()) nb::raise_python_error();  // the call may be under way; its outcome goes to the pool
  return id;
}

std::optional<nb::tuple> wait(Engine& e, std::uint64_t id, Nanos timeout) {
  Interruption interruption;
  const auto interrupted = interruption.ask();
  Outcome outcome;
  WaitEnd end;
  {
    nb::gil_scoped_release no_gil;
    end = e.wait(id, deadline_of(timeout), interrupted, outcome);
  }
  release_references();
  if (end == WaitEnd::kInterrupted) nb::raise_python_error();
  if (end != WaitEnd::kDone) return std::nullopt;
  return outcome_tuple(std::move(outcome));
}

void reply(Engine& e, std::uint64_t connection, std::uint64_t call, int tag, int flags, const nb::bytes& body,
           nb::handle segments, Nanos timeout) {
  auto m = compose(tag, flags, body, segments, true);
  if (m->payload_size() <= kSmall) {
    e.reply(connection, call, std::move(m), kNever, false);
  } else {
    nb::gil_scoped_release no_gil;
    e.reply(connection, call, std::move(m), deadline_of(timeout), true);
  }
  release_references();
}

bool send(Engine& e, std::int32_t peer, int tag, int flags, const nb::bytes& body, nb::handle segments) {
  auto m = compose(tag, flags, body, segments, false);
  bool sent;
  {
    nb::gil_scoped_release no_gil;
    sent = e.send(peer, std::move(m));
  }
  release_references();
  return sent;
}

std::optional<nb::tuple> next(Engine& e, PoolThread& self) {
  Item item;
  // While there is work, the GIL stays here: letting go of it for a moment can cost a thread its switch interval.
  release_references();  // what the last item held, before this thread sleeps
  bool more = e.try_next(self, item);
  if (!more) {
    nb::gil_scoped_release no_gil;
    const WakesForReferences wakes(e);
    more = e.next(self, item);
  }
  release_references();
  if (!more) return std::nullopt;
  const int kind = static_cast<int>(item.kind);
  switch (item.kind) {
    case ItemKind::kRequest:
    case ItemKind::kOneway: {
      const FrameHeader& h = item.message.header;
      return nb::make_tuple(kind, item.spawn, item.peer, item.connection, h.call_id, h.tag, h.flags,
                            name_object(item.name), body_object(std::move(item.message.body)),
                            segment_list(std::move(item.message.segments)),
                            item.deadline == kNever ? Nanos{0} : item.deadline);
    }
    case ItemKind::kOutcome: {
      nb::object cookie = nb::none();
      if (item.cookie) cookie = nb::borrow(static_cast<References&>(*item.cookie).front());
      return nb::make_tuple(kind, item.spawn, cookie, outcome_tuple(std::move(item.outcome)));
    }
    case ItemKind::kEvent:
      return nb::make_tuple(kind, item.spawn, static_cast<int>(item.event), item.peer, item.incarnation, item.text);
    case ItemKind::kRetire:
      return nb::make_tuple(kind, item.spawn);
  }
  return std::nullopt;
}

void construct(Engine* self, int id, const std::string& name, std::uint64_t incarnation, const std::string& group,
               const nb::bytes& secret, const nb::callable& hmac, Nanos spin, std::size_t handlers, std::int64_t window,
               std::size_t pool_cache, Nanos handshake_timeout, Nanos connect_timeout, std::uint64_t max_body,
               std::uint64_t max_message, bool check_uid) {
  Settings s;
  s.credo.me = {.id = id, .name = name, .incarnation = incarnation};
  s.credo.group = group;
  s.credo.secret = std::string(view(secret));
  // Python's own HMAC. Called by whichever thread polls, which has let go of the GIL and holds no lock of the core.
  auto* function = new nb::callable(hmac);  // lives as long as the process: an engine may be abandoned in a fork
  s.credo.hmac = [function](std::string_view key, std::string_view message) {
    nb::gil_scoped_acquire gil;
    nb::bytes mac =
        nb::cast<nb::bytes>((*function)(nb::bytes(key.data(), key.size()), nb::bytes(message.data(), message.size())));
    return std::string(view(mac));
  };
  s.spin = spin;
  s.handlers = handlers;
  s.window = window;
  s.pool_cache = pool_cache;
  s.handshake_timeout = handshake_timeout;
  s.connect_timeout = connect_timeout;
  s.limits.body = max_body;
  s.limits.message = max_message;
  s.check_uid = check_uid;
  new (self) Engine(std::move(s));
}

nb::dict stats(const Engine& e) {
  const EngineStats s = e.stats();
  nb::dict d;
  d["pending_calls"] = s.pending_calls;
  d["queued_requests"] = s.queued_requests;
  d["pool_threads"] = s.pool_threads;
  d["running_handlers"] = s.running_handlers;
  d["running_requests"] = s.running_requests;
  d["connections"] = s.connections;
  d["requests"] = s.requests;
  d["replies"] = s.replies;
  d["sent_messages"] = s.sent_messages;
  d["received_messages"] = s.received_messages;
  d["live_blocks"] = s.memory.live_blocks;
  d["live_bytes"] = s.memory.live_bytes;
  d["cached_blocks"] = s.memory.cached_blocks;
  d["cached_bytes"] = s.memory.cached_bytes;
  d["pool_hits"] = s.memory.hits;
  d["pool_misses"] = s.memory.misses;
  return d;
}

}  // namespace

void init_engine(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      nb::object args = nb::make_tuple(e.code().value(), std::string(e.what()));
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  nb::class_<PoolThread>(m, "PoolThread", "A thread of the pool, for `Engine.next`; used by one thread only.")
      .def(nb::init<>());

  nb::class_<Engine>(m, "Engine",
                     "The native half of one worker: links, calls, threads' sleep. Times are in nanoseconds, a "
                     "time-out of 0 is infinite.")
      .def("__init__", construct, nb::kw_only(), "id"_a, "name"_a, "incarnation"_a, "group"_a, "secret"_a, "hmac"_a,
           "spin"_a, "handlers"_a, "window"_a, "pool_cache"_a, "handshake_timeout"_a, "connect_timeout"_a, "max_body"_a,
           "max_message"_a, "check_uid"_a)
      .def("listen", &Engine::listen, "address"_a, "Listens on an address; returns what peers connect to.")
      .def(
          "set_peer",
          [](Engine& e, int id, std::string name, std::uint64_t incarnation, std::vector<std::string> addresses) {
            e.set_peer({.identity = {.id = id, .name = std::move(name), .incarnation = incarnation},
                        .addresses = std::move(addresses)});
          },
          "id"_a, "name"_a, "incarnation"_a, "addresses"_a)
      .def("part_from", &Engine::part_from, "id"_a, "why"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("forget_peer", &Engine::forget_peer, "id"_a, "why"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("call", call, "peer"_a, "tag"_a, "flags"_a, "name_id"_a, "name"_a.none(), "body"_a, "segments"_a.none(),
           "timeout"_a, "nested"_a, "linger"_a.none(),
           "Sends a request and waits. Returns (status, tag, flags, body, segments, peer, why).")
      .def("start", start, "peer"_a, "tag"_a, "flags"_a, "name_id"_a, "name"_a.none(), "body"_a, "segments"_a.none(),
           "timeout"_a, "nested"_a, "never_wait"_a, "cookie"_a, "linger"_a.none(),
           "Sends a request; its outcome goes to the pool with `cookie`, unless somebody waits for it. Returns the "
           "call's id.")
      .def("wait", wait, "call"_a, "timeout"_a, "The outcome of a started call, or None: it went to the pool.")
      .def("reply", reply, "connection"_a, "call"_a, "tag"_a, "flags"_a, "body"_a, "segments"_a.none(), "timeout"_a)
      .def("send", send, "peer"_a, "tag"_a, "flags"_a, "body"_a, "segments"_a.none(),
           "Sends a message that is never answered. False: the peer is known to be gone.")
      .def("next", next, "thread"_a,
           "The next thing to do, by a pool thread: blocks; None when the engine has stopped.\n"
           "(0 request | 1 one-way, spawn, peer, connection, call, tag, flags, name, body, segments, deadline),\n"
           "(2 outcome, spawn, cookie, outcome), (3 event, spawn, event, peer, incarnation, text), (4 retire, spawn).")
      .def("nudge", &Engine::nudge, "delay"_a,
           "Asks for one event of kind 3 in the pool, after a while. Takes no lock: a finalizer may call it at any "
           "point.")
      .def("stop", &Engine::stop, "linger"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", stats);
}

}  // namespace telegrad::bind

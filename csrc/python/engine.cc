// `_core.Engine`: the engine for Python. Every call that may wait or copy much does so without the GIL.
#include "core/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <system_error>

#include "base/crypto.h"
#include "codec/gil.h"
#include "core/link_security.h"
#include "python/buffer_leases.h"
#include "python/calls.h"
#include "python/deferred_decref.h"
#include "python/engine.h"
#include "python/messages.h"
#include "python/multicast.h"

using namespace nanobind::literals;

namespace telegrad::python {
namespace {

Nanos deadline_of(Nanos timeout) { return deadline_after(now(), timeout); }

std::unique_ptr<KeepAlive> refs_to(nb::handle object) {
  if (object.is_none()) return nullptr;
  auto owner = std::make_unique<PyRefs>();
  owner->add(object);
  return owner;
}

nb::tuple call(Engine& e, std::int32_t peer, int tag, int flags, std::uint32_t name_id, nb::handle name,
               const nb::bytes& body, nb::handle segments, Nanos timeout, bool nested, nb::handle keep_alive) {
  auto m = compose(tag, flags, body, segments);
  set_name(*m, name_id, name);
  CallOptions o;
  o.deadline = deadline_of(timeout);
  o.nested = nested;
  o.keep_alive = refs_to(keep_alive);
  return completion_tuple(call_and_wait(e, peer, std::move(m), std::move(o)));
}

bool reply(Engine& e, std::uint64_t connection, std::uint64_t call, int tag, int flags, const nb::bytes& body,
           nb::handle segments) {
  auto m = compose(tag, flags, body, segments);
  // Leave the message as the only holder: see hand_off_leases and record_versions.
  if (!segments.is_none() && (any_leases() || m->payload_size() > kMaxCopied)) nb::cast<nb::list>(segments).clear();
  return send_reply(e, connection, call, std::move(m));
}

bool send(Engine& e, std::int32_t peer, int tag, int flags, const nb::bytes& body, nb::handle segments,
          std::int64_t epoch) {
  auto m = compose(tag, flags, body, segments);
  m->epoch = epoch;
  bool sent;
  {
    const GilReleased no_gil;
    sent = e.send(peer, std::move(m));
  }
  decref_deferred();
  return sent;
}

std::optional<nb::tuple> next(Engine& e, PoolThread& self) {
  WorkItem item;
  if (!next_work_item(e, self, item)) return std::nullopt;
  if (item.kind == WorkKind::kVerify) {
    verify(e, item);
    item.kind = WorkKind::kNoWork;
  }
  return work_item_tuple(std::move(item));
}

void construct(Engine* self, int id, const std::string& name, std::uint64_t incarnation, const std::string& group,
               const nb::bytes& secret, Nanos spin, std::size_t handlers, std::int64_t window, std::size_t pool_cache,
               Nanos handshake_timeout, Nanos connect_timeout, Nanos heartbeat, Nanos local_heartbeat,
               std::uint64_t max_body, std::uint64_t max_message, std::uint64_t shared_memory, std::uint32_t lanes,
               std::uint32_t max_call_depth, std::uint32_t max_in_flight, std::uint64_t max_in_flight_bytes,
               std::uint64_t send_queue, std::uint64_t max_waiting, std::uint64_t arena_budget, std::uint64_t max_peers,
               std::uint64_t max_unauthenticated, bool resume, bool check_uid, bool secret_given, bool encrypted,
               const std::string& certificate, const std::string& private_key, const std::string& authority,
               FaultsPtr faults) {
  if (secret_given && !has_crypto()) throw std::runtime_error(std::string(kNoOpenSsl));
  Settings s;
  s.handshake.me = {.id = id, .name = name, .incarnation = incarnation};
  s.handshake.group = group;
  s.handshake.secret = std::string(view(secret));
  s.spin = spin;
  s.handlers = handlers;
  s.window = window;
  s.pool_cache = pool_cache;
  s.handshake_timeout = handshake_timeout;
  s.connect_timeout = connect_timeout;
  s.heartbeat = heartbeat;
  s.local_heartbeat = local_heartbeat;
  s.handshake.limits.body = max_body;
  s.handshake.limits.message = max_message;
  s.handshake.limits.leased = shared_memory;
  s.handshake.limits.requests = max_in_flight;
  s.handshake.limits.request_bytes = max_in_flight_bytes;
  s.handshake.lanes = lanes;
  s.load = {.call_depth = max_call_depth,
            .send_queue = send_queue,
            .waiting_messages = max_waiting,
            .arena_budget = arena_budget,
            .peers = max_peers,
            .unauthenticated = max_unauthenticated};
  s.handshake.resume = resume && heartbeat > 0;  // the failure detector ends suspended sessions
  s.check_uid = check_uid;
  s.faults = std::move(faults);
  if (encrypted) {
    s.security =
        make_tls({.key = certificate.empty() ? derive_key(s.handshake.secret, "telegrad tls " + group, 32) : "",
                  .certificate = certificate,
                  .private_key = private_key,
                  .authority = authority});
  }
  new (self) Engine(std::move(s));
}

void add(nb::dict& d, const BufferPoolStats& s) {
  d["live_blocks"] = s.live_blocks;
  d["live_bytes"] = s.live_bytes;
  d["cached_blocks"] = s.cached_blocks;
  d["cached_bytes"] = s.cached_bytes;
  d["pool_hits"] = s.hits;
  d["pool_misses"] = s.misses;
}

nb::dict stats(const Engine& e) {
  const EngineStats s = e.stats();
  nb::dict d;
  d["pending_calls"] = s.pending_calls;
  d["queued_requests"] = s.queued_requests;
  d["pool_threads"] = s.pool_threads;
  d["running_handlers"] = s.running_handlers;
  d["running_requests"] = s.running_requests;
  d["detached_requests"] = s.detached_requests;
  d["connections"] = s.connections;
  d["lanes"] = s.lanes;
  d["requests"] = s.requests;
  d["replies"] = s.replies;
  d["sent_messages"] = s.sent_messages;
  d["received_messages"] = s.received_messages;
  d["multicast_buffers"] = s.multicast_buffers;
  add(d, s.memory);
  return d;
}

nb::tuple snapshot(Engine& e) {
  std::vector<std::pair<std::uint64_t, nb::object>> targets;
  Snapshot found = e.snapshot([&targets](std::uint64_t call, const KeepAlive& target) {
    targets.emplace_back(call, nb::borrow(static_cast<const PyRefs&>(target).front()));
  });
  nb::dict by_call;
  for (auto& [call, target] : targets) by_call[nb::int_(call)] = std::move(target);
  return nb::make_tuple(std::move(found), std::move(by_call));
}

/// `_core.Memory`: received memory that outlives its engine.
struct Memory {
  std::shared_ptr<BufferPool> pool;
};

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

  nb::class_<PoolThread>(m, "PoolThread", "State of one pool thread in `Engine.next`.").def(nb::init<>());

  nb::class_<Memory>(m, "Memory", "Memory of received messages. It outlives the engine.")
      .def(
          "stats",
          [](const Memory& memory) {
            nb::dict d;
            add(d, memory.pool->stats());
            return d;
          },
          "Return the counts and bytes of blocks in use and in the cache.");

  m.def("openssl_version", openssl_version, "Return the version of OpenSSL in use; \"\" for a build without it.");

  m.def("release", decref_deferred,
        "Release Python objects that engines no longer use.\n\n"
        "Every call of an engine does so; needed after the end of the last engine.");

  nb::class_<Engine> engine(m, "Engine",
                            "The native part of one worker: connections, calls, queues.\n\n"
                            "Times are in nanoseconds; a timeout of 0 is infinite.");
  engine
      .def("__init__", construct, nb::kw_only(), "id"_a, "name"_a, "incarnation"_a, "group"_a, "secret"_a, "spin"_a,
           "handlers"_a, "window"_a, "pool_cache"_a, "handshake_timeout"_a, "connect_timeout"_a, "heartbeat"_a,
           "local_heartbeat"_a, "max_body"_a, "max_message"_a, "shared_memory"_a, "lanes"_a, "max_call_depth"_a,
           "max_in_flight"_a, "max_in_flight_bytes"_a, "send_queue"_a, "max_waiting"_a, "arena_budget"_a, "max_peers"_a,
           "max_unauthenticated"_a, "resume"_a, "check_uid"_a, "secret_given"_a, "encrypted"_a, "certificate"_a,
           "private_key"_a, "authority"_a, "faults"_a.none())
      .def("listen", &Engine::listen, "address"_a, "Listen on an address and return the address that peers connect to.")
      .def(
          "set_peer",
          [](Engine& e, int id, std::string name, std::uint64_t incarnation, std::vector<std::string> addresses) {
            e.set_peer({.identity = {.id = id, .name = std::move(name), .incarnation = incarnation},
                        .addresses = std::move(addresses)});
          },
          "id"_a, "name"_a, "incarnation"_a, "addresses"_a)
      .def("acknowledge", &Engine::acknowledge, "id"_a, nb::call_guard<GilReleased>(),
           "Report that an event of a session with the peer has been processed.\n\n"
           "The next session with the peer opens after all of them.")
      .def("set_epoch", &Engine::set_epoch, "id"_a, "epoch"_a,
           "Set the epoch of the messages to the peer that may still be sent.\n\n"
           "Messages of an earlier epoch belong to an ended session, and are not sent.")
      .def("is_open", &Engine::is_open, "connection"_a, "Return whether the session of a connection has not ended.")
      .def("disconnect", &Engine::disconnect, "id"_a, "why"_a, "incarnation"_a, nb::call_guard<GilReleased>())
      .def("remove_peer", &Engine::remove_peer, "id"_a, "why"_a, "incarnation"_a, nb::call_guard<GilReleased>())
      .def("call", call, "peer"_a, "tag"_a, "flags"_a, "name_id"_a, "name"_a.none(), "body"_a, "segments"_a.none(),
           "timeout"_a, "nested"_a, "keep_alive"_a.none(),
           "Send a request and wait.\n\n"
           "Returns the completion, see `telegrad.wire.CompletionField`.")
      .def("reply", reply, "connection"_a, "call"_a, "tag"_a, "flags"_a, "body"_a, "segments"_a.none(),
           "Reply to a request. False: its session has ended.\n\n"
           "The segments' memory may change once this has returned; the list may be emptied.")
      .def("detach", &Engine::detach, "connection"_a, "call"_a, "deferred"_a,
           "Record that no thread runs a request, and return whether it has been canceled.\n\n"
           "If it is canceled later, the pool gets a work item of the kind CANCEL.")
      .def("parked", &Engine::parked, "Return the number of requests that wait for their inputs.")
      .def("is_canceled", &Engine::is_canceled, "connection"_a, "call"_a,
           "Return whether a request that has no reply yet has been canceled.")
      .def("mark_late", &Engine::mark_late, "connection"_a, "call"_a,
           "Record that the handler of a request has seen that its deadline has passed.\n\n"
           "The call times out, whatever the reply to the request is.")
      .def("largest_body", &Engine::largest_body, "connection"_a,
           "Return the size limit in bytes of a reply's body; a larger body is left out.")
      .def("lend", lease, "peer"_a, "connection"_a, "size"_a,
           "Lease memory for a tensor of `size` bytes that will be sent to a peer.\n\n"
           "Returns None if the link leases none. The link is that of `connection` if it belongs to the peer (`peer`\n"
           "may then be -1), else the link of requests.\n\n"
           "A reply over this connection transfers it without a copy if no other code holds it by then.")
      .def("send", send, "peer"_a, "tag"_a, "flags"_a, "body"_a, "segments"_a.none(), "epoch"_a = kAnyEpoch,
           "Send a one-way message. False: it is not sent.\n\n"
           "The peer is known to have left, or the epoch has ended.")
      .def("next", next, "thread"_a,
           "Block until a work item is ready for this pool thread, and return it.\n\n"
           "Returns None when the engine has stopped.\n\n"
           "`telegrad.wire.WorkKind` has the kinds of items, `MessageItemField` and the other tables their fields.")
      .def("spawn_failed", &Engine::spawn_failed,
           "Report that the thread that a work item asked for could not be started.")
      .def("request_callback", &Engine::request_callback, "delay"_a,
           "Request one event of the kind CALLBACK in the pool after `delay`.\n\n"
           "Takes no lock, so finalizers may call it.")
      .def("stop", &Engine::stop, "timeout"_a, nb::call_guard<GilReleased>())
      .def("stats", stats)
      .def("snapshot", snapshot, nb::sig("def snapshot(self) -> tuple[Snapshot, dict[int, object]]"),
           "Return what the engine is doing, and the targets of asynchronous calls.\n\n"
           "Copies under the mutex: for a worker that hangs, not for each call.")
      .def("find_request", &Engine::find_request, "connection"_a, "call"_a,
           "Return a request that has begun and has no reply; None if there is none.")
      .def_prop_ro("memory", [](const Engine& e) { return Memory{e.buffers()}; });
  init_multicast(engine);
}

}  // namespace telegrad::python

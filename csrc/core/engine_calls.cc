// Calls, replies and messages of the engine, and memory for them.
#include <algorithm>
#include <new>
#include <utility>

#include "core/engine.h"
#include "core/left_out.h"
#include "core/tuning.h"

namespace telegrad {

namespace {

/// Completes the header of a request.
void stamp_request(Outgoing& m, std::uint64_t id, const CallOptions& o, Nanos at) {
  m.header.type = FrameType::kRequest;
  m.header.call_id = id;
  m.header.depth = o.depth;
  m.deadline = o.deadline;
  m.stable = o.waits;
  stamp_timeout(m, at);
  if (o.nested) m.header.flags |= kNested;
  m.admitted = !(m.header.flags & kLeftOut);
}

}  // namespace

/// Opens a call, and decides how its request is sent. Returns false if it is not: the call has failed.
[[gnu::always_inline]] inline bool Engine::admit(std::int32_t peer, Outgoing& m, CallOptions& o, Nanos at, Route& route,
                                                 Released& released) {
  Lock lock(parts_.mutex);
  const std::uint64_t id = route.id = parts_.calls.open(peer, m.header, at, o);
  if (parts_.is_stopping()) {
    parts_.calls.complete(id, Completion{.status = CallStatus::kStopped, .why = kShutDown}, released);
    return false;
  }
  ConnectionPtr& connection = route.connection;
  if (const Peer* found = parts_.peers.find(peer)) {
    connection = found->connection;
    if (parts_.sender.reject_outdated(*found, id, m, released)) return false;
  }
  if (connection && parts_.sender.reject_oversized(*connection, id, m, released)) return false;
  route.size = weight(m.payload_size());
  route.straight = connection && parts_.sender.window_open(*connection, route.size);
  if (!route.straight || !parts_.overload.is_light(*connection, o)) {
    if (parts_.overload.reject(id, peer, route.size, m, o, released)) return false;
    route.size = weight(m.payload_size());  // it may have removed the content
  }
  if (route.straight) parts_.calls.find(id)->connection = connection->id;
  if (route.size > kLargePayload && connection && (route.straight || o.nested || o.never_wait))
    // Under the lock of the check: callers must not pass it together. Until `route` sends the message, no thread
    // knows the id with which the call could end; if the session ends, the count ends with its connection.
    connection->in_flight_bytes.add(id, route.size);
  return true;
}

std::uint64_t Engine::start(std::int32_t peer, std::unique_ptr<Outgoing>&& m, CallOptions o) {
  const Nanos at = now();
  const bool async = o.target != nullptr;
  Released released;
  Route route;
  if (!admit(peer, *m, o, at, route, released)) return route.id;
  stamp_request(*m, route.id, o, at);
  if (!route.straight) await_window(peer, *m, o, route, released);
  const bool borrowed = !m->segments.empty() && !m->immutable;
  Transmission p{.copy = o.never_wait, .may_coalesce = async, .before_blocking = &o.before_blocking};
  if (borrowed && o.never_wait && route.size > kLargePayload)
    p.copied_owner = copy_payload(*m);  // copy before any lock is held
  if (route.straight) p.connection = route.connection;
  const SendResult result =
      route.straight ? parts_.sender.transmit(route.connection, m, p) : parts_.sender.route(peer, m, p);
  if (result == SendResult::kQueued && borrowed && !p.copy)
    parts_.sender.wait_until_sent(peer, p, o.deadline, o.interrupted);
  if (async) ensure_completion(route.id, o);
  return route.id;
}

/// Waits until the peer takes one more request, unless the caller cannot wait.
void Engine::await_window(std::int32_t peer, Outgoing& m, const CallOptions& o, const Route& route,
                          Released& released) {
  if (o.nested || o.never_wait) {
    if (route.connection) parts_.sender.count_over_window(*route.connection, peer, route.size);
    return;
  }
  const bool has_room = wait_for_room(route.id, peer, route.size, o);
  stamp_timeout(m, now());
  if (has_room) return;
  Lock lock(parts_.mutex);
  parts_.calls.complete(route.id, Completion::timed_out(CallState::kWaiting), released);  // the call is not made
}

/// Waits until the peer has room for a request, and counts its bytes. Returns false if the deadline has passed, or the
/// wait was interrupted.
bool Engine::wait_for_room(std::uint64_t id, std::int32_t peer, std::int64_t size, const CallOptions& o) {
  WaitEnd end = WaitEnd::kDone;
  while (end == WaitEnd::kDone) {
    ConnectionPtr connection;
    {
      Lock lock(parts_.mutex);
      const Peer* found = parts_.peers.find(peer);
      connection = found ? found->connection : nullptr;
      if (parts_.overload.has_room(peer, size)) {
        if (connection) connection->in_flight_bytes.add(id, size);
        return true;
      }
    }
    if (connection) parts_.sender.send_window(connection);
    Waiter w;
    const auto may_have_room = [&]() REQUIRES(engine_mutex) {
      const Peer* found = parts_.peers.find(peer);
      return !found || found->connection != connection || parts_.overload.has_room(peer, size);
    };
    end = parts_.leader.wait_for_progress(w, may_have_room, o.deadline, o.interrupted);
  }
  return end == WaitEnd::kStopped;
}

/// Ensures that an asynchronous call completes, though no thread may wait for it.
void Engine::ensure_completion(std::uint64_t id, const CallOptions& o) {
  Lock lock(parts_.mutex);
  parts_.calls.set_deadline(id, o.deadline);
  if (parts_.leader.exists()) return;  // it sees the call when its term ends
  // A thread that runs completions polls for more when it is done.
  if (o.background || o.polled || parts_.queue.is_running_completions()) {
    parts_.timer.arm(now() + parts_.leader.handoff_delay());
  } else {
    parts_.leader.watch_links();  // the pool must see the reply
  }
}

bool Engine::reply(std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing>&& m, bool may_wait,
                   const std::function<void()>& before_blocking) {
  ConnectionPtr c;
  bool more;  // other requests are waiting for a thread
  {
    Lock lock(parts_.mutex);
    if (parts_.canceler.on_reply(connection, call)) [[unlikely]]
      m->header.flags |= kLate;
    c = parts_.peers.find_connection(connection);
    if (!c) return false;  // the caller has disconnected
    more = parts_.queue.has_requests();
    if (!c->unanswered_bytes.empty()) [[unlikely]]
      c->unanswered_bytes.remove(call);
  }
  c->unanswered.fetch_sub(1, std::memory_order_relaxed);
  m->header.type = FrameType::kReply;
  m->header.call_id = call;
  if (!fits(*m, c->limits)) {
    parts_.overload.count_oversized(*m, c->limits);
    leave_out(*m, LeftOut::kTooLarge, over_limits(*m, c->limits, c->handshake.peer().name));
  }
  std::int64_t size = weight(m->payload_size());
  if (parts_.overload.check_reply(*c, size, *m)) [[unlikely]]
    size = weight(m->payload_size());
  m->admitted = size >= static_cast<std::int64_t>(kAlwaysTaken);
  PoolThread* self = may_wait && !m->segments.empty() && !c->stalled ? parts_.queue.this_thread() : nullptr;
  Transmission p{.copy = !self, .may_coalesce = more, .before_blocking = &before_blocking, .connection = c};
  if (p.copy && size > kLargePayload) p.copied_owner = copy_payload(*m);
  const SendResult result = parts_.sender.transmit(c, m, p);
  parts_.sender.check_reply_window(c, size);
  if (result == SendResult::kQueued && self) parts_.sender.wait_until_reply_sent(*self, p);
  return result != SendResult::kBroken;
}

bool Engine::send(std::int32_t peer, std::unique_ptr<Outgoing> m) {
  m->header.type = FrameType::kOneway;
  Transmission p{.copy = true};
  return parts_.sender.route(peer, m, p) != SendResult::kBroken;
}

std::uint64_t Engine::largest_body(std::uint64_t connection) const {
  Lock lock(parts_.mutex);
  const ConnectionPtr c = parts_.peers.find_connection(connection);
  return c ? c->limits.body : UINT64_MAX;  // without a connection it is dropped
}

// ---- memory

std::optional<BufferLease> Engine::lease(std::int32_t peer, std::uint64_t connection, std::size_t size) {
  ConnectionPtr c;
  {
    Lock lock(parts_.mutex);
    c = parts_.peers.find_connection(connection);
    if (!c || (peer >= 0 && c->peer != peer)) {
      const Peer* found = parts_.peers.find(peer);
      c = found ? found->connection : nullptr;
    }
    if (parts_.is_stopping() || !c || c->state != Connection::State::kOpen) return std::nullopt;
  }
  auto leased = c->link->lease(size);
  if (!leased) return std::nullopt;
  try {
    return BufferLease{
        .connection = c->id, .lease = leased->lease, .memory = parts_.buffers->adopt(std::move(leased->memory))};
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

std::shared_ptr<MulticastBuffer> Engine::allocate_multicast(std::span<const std::int32_t> peers, std::size_t size) {
  std::shared_ptr<MulticastBuffer> buffer = parts_.multicast_arena->allocate(size);
  if (!buffer) return nullptr;
  std::vector<ConnectionPtr> connections;
  {
    Lock lock(parts_.mutex);
    for (const std::int32_t peer : peers) {
      const Peer* found = parts_.peers.find(peer);
      if (found && found->connection) connections.push_back(found->connection);
    }
    parts_.timer.arm(now() + kTrimInterval);
  }
  for (const auto& c : connections) {
    if (c->state == Connection::State::kOpen) c->link->announce(*buffer);
  }
  return buffer;
}

}  // namespace telegrad

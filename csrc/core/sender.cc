#include "core/sender.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/tuning.h"

namespace telegrad {
namespace {

/// Returns whether a queued message has left the queue of its connection.
bool has_left_queue(const Transmission& p) {
  return p.queue->flushed.load(std::memory_order_acquire) >= p.ticket ||
         p.connection->state == Connection::State::kClosed;
}

}  // namespace

// ---- messages

SendResult Sender::route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Transmission& transmission) {
  Released released;
  {
    Lock lock(parts_.mutex);
    const std::uint64_t id = m->header.type == FrameType::kRequest ? m->header.call_id : 0;
    Call* call = id ? parts_.calls.find(id) : nullptr;
    const bool pending = call && call->status == CallStatus::kPending;
    if (id && !pending && !(m->header.flags & kMustDeliver)) return SendResult::kDone;  // the call has already ended
    if (id && !pending && may_leave_out(m->header)) leave_out(*m, LeftOut::kCanceled, "");
    if (parts_.is_stopping()) {
      if (id) parts_.calls.complete(id, Completion{.status = CallStatus::kStopped, .why = kShutDown}, released);
      parts_.calls.release_keep_alive(id, released);
      return SendResult::kBroken;
    }
    Peer* const found = parts_.peers.find(peer);
    if (!found || found->removed) {
      const LinkError why = found ? found->last_error : "no such worker";
      if (id) parts_.calls.complete(id, Completion::lost(CallStatus::kUnreachable, why), released);
      parts_.calls.release_keep_alive(id, released);
      return SendResult::kBroken;
    }
    Peer& p = *found;
    const auto rejected = [&] {
      if (id && p.connection) p.connection->in_flight_bytes.remove(id);
      return id ? SendResult::kDone : SendResult::kBroken;
    };
    if (reject_outdated(p, id, *m, released)) return rejected();
    transmission.connection = p.connection;
    if (!p.connection) {
      if (transmission.copy) {
        if (auto copied_owner = copy_payload(*m)) transmission.copied_owner = std::move(copied_owner);
      } else if (!m->segments.empty() && !m->immutable) {
        transmission.pending_send = m->pending_send = std::make_shared<PendingSend>();
      }
      // Without a call that stops waiting, a message waits for as long as the peer may be silent.
      const bool waits_for_loss = !id || !pending || call->wait_for_connection;
      const Nanos at = now(), limit = deadline_after(at, parts_.settings.connect_timeout);
      const Nanos until = transmission.until ? *transmission.until
                          : waits_for_loss   ? parts_.detector.time_of_loss(at, limit)
                                             : limit;
      const bool expired = transmission.expired || (waits_for_loss && !transmission.until);
      p.pending.add({.message = std::move(m), .until = until, .expired = expired});
      parts_.peers.arm_timer(until);
      if (const std::string why = parts_.overload.pending_reason(p); !why.empty()) {
        parts_.peers.give_up(p, why, released);
        return SendResult::kQueued;
      }
      if (!p.connecting) parts_.peers.connect(lock, p);
      return SendResult::kQueued;
    }
    if (reject_oversized(*p.connection, id, *m, released)) return rejected();
    if (id) {
      parts_.calls.set_connection(id, p.connection->id);
      p.connection->in_flight_bytes.add(id, weight(m->payload_size()));
    }
  }
  return transmit(transmission.connection, m, transmission);
}

SendResult Sender::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p) {
  if (!c->send_mutex.try_lock()) {
    if (p.before_blocking && *p.before_blocking) (*p.before_blocking)();
    c->waiting_senders.fetch_add(1, std::memory_order_relaxed);
    c->send_mutex.lock();
    c->waiting_senders.fetch_sub(1, std::memory_order_relaxed);
  }
  MutexLock lock(c->send_mutex, std::adopt_lock);
  return transmit_locked(c, m, p);
}

SendResult Sender::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m) {
  Transmission p;
  return transmit(c, m, p);
}

SendResult Sender::transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p) {
  const bool is_request = m->header.type == FrameType::kRequest;
  const std::int64_t counted = is_request ? weight(m->payload_size()) : 0;
  m->large = !m->segments.empty() && c->link->is_large(*m);
  if (is_request) {
    if (m->large) c->large_unsent.fetch_add(counted, std::memory_order_relaxed);
    c->outstanding.fetch_add(counted, std::memory_order_relaxed);
    c->in_flight.fetch_add(1, std::memory_order_relaxed);
  }
  sent_messages_.fetch_add(1, std::memory_order_relaxed);
  if (c->state == Connection::State::kClosed) return SendResult::kBroken;
  p.queue = c->queued_large > 0 && !m->large && c->order.may_overtake(m->header) ? &c->overtaking : &c->queue;
  const bool idle = c->queue.empty() && c->overtaking.empty();
  const bool between = p.queue == &c->overtaking && c->overtaking.empty() && c->queue.front().large;
  bool blocked = false;
  if (idle || between) {
    prepare(*c, *m);
    const bool with_others = c->buffered > 0 && m->header.type != FrameType::kGoodbye;  // a goodbye is flushed at once
    if (idle && (p.may_coalesce || with_others) && coalesce(c, *m, p.may_coalesce)) return SendResult::kDone;
    c->buffered = 0;
    SendState state = idle ? c->link->send(*m) : c->link->send_between(*m);
    for (int part = 1; part < kPartsInARow && state == SendState::kBlocked && c->link->may_continue(); ++part) {
      if (c->waiting_senders.load(std::memory_order_relaxed) > 0) break;
      state = c->link->send(*m);
    }
    if (state == SendState::kSent && m->large) c->large_unsent.fetch_sub(counted, std::memory_order_relaxed);
    if (state == SendState::kSent) return SendResult::kDone;
    if (state == SendState::kBroken) return SendResult::kBroken;
    blocked = true;
    if (c->link->may_continue()) can_continue_.store(true, std::memory_order_relaxed);
  }
  if (m->large) m->request_weight = counted;  // `copy_payload` makes the message smaller
  if (p.copy) {
    if (auto copied_owner = copy_payload(*m)) p.copied_owner = std::move(copied_owner);
  }
  enqueue(*c, std::move(m), p);
  parts_.overload.check_queue(c);
  // A message in between may wait for acknowledgements, and the large one for the link.
  if (blocked && (idle || c->link->waits_for_fd())) watch_writable(*c, c->link->waits_for_fd());
  return SendResult::kQueued;
}

void Sender::send_pending(const ConnectionPtr& c, std::deque<PendingMessage>& pending) {
  bool any_waits = false;
  for (auto& [m, until, expired, kept, request] : pending) {
    const auto pending_send = m->pending_send;
    Transmission p;
    stamp_timeout(*m, now());
    const SendResult result = transmit_locked(c, m, p);
    if (!pending_send) continue;
    Lock lock(parts_.mutex);
    pending_send->done = result != SendResult::kQueued;
    pending_send->connection = c;
    pending_send->queue = p.queue;
    pending_send->ticket = p.ticket;
    any_waits = true;
  }
  if (!any_waits) return;
  Lock lock(parts_.mutex);
  parts_.leader.notify_progress();
}

void Sender::on_writable(const ConnectionPtr& c) {
  c->progress.fetch_add(1, std::memory_order_relaxed);
  flush(c);
}

void Sender::flush(const ConnectionPtr& c) {
  std::vector<std::unique_ptr<Outgoing>> done;
  // A mutex is not fair: without this, a thread with a small message would wait until a large one has been sent.
  const Nanos until = c->waiting_senders.load(std::memory_order_relaxed) > 0 ? now() + kSenderTurn : 0;
  while (until > 0 && c->waiting_senders.load(std::memory_order_relaxed) > 0 && now() < until)
    std::this_thread::yield();
  {
    MutexLock lock(c->send_mutex);
    const bool buffered = c->link->flush() == SendState::kBlocked;
    bool waits_for_fd = !(buffered || c->link->sends_again()) || c->link->waits_for_fd();
    c->stalled.store(false, std::memory_order_relaxed);
    while (!buffered && !(c->queue.empty() && c->overtaking.empty())) {
      SendQueue& queue = next_queue(*c);
      Outgoing& front = queue.front();
      if (!front.is_begun() && front.sent == 0) stamp_timeout(front, now());
      prepare(*c, front);
      const bool between = &queue == &c->overtaking && !c->queue.empty() && c->queue.front().large;
      const SendState state = between ? c->link->send_between(front) : c->link->send(front);
      if (state == SendState::kBlocked) waits_for_fd = c->link->waits_for_fd();
      if (state != SendState::kSent) break;  // the leader reports a broken link
      done.push_back(dequeue(*c, queue));
    }
    const bool left = buffered || !c->queue.empty() || !c->overtaking.empty() || c->link->sends_again();
    watch_writable(*c, left && waits_for_fd);
    if (left && c->link->may_continue()) can_continue_.store(true, std::memory_order_relaxed);
  }
  parts_.peers.open_lanes(c);
  if (!done.empty()) {
    Lock lock(parts_.mutex);
    parts_.leader.notify_progress();
  }
}

void Sender::flush_by_leader(const ConnectionPtr& c) {
  MutexLock sending(c->send_mutex);
  Lock lock(parts_.mutex);
  if (parts_.peers.has_connection(c->id) && !c->resumption.is_suspended()) watch_writable(*c, true);
}

void Sender::fail_outdated(std::uint64_t id, Released& released) {
  if (id == 0) return;
  parts_.calls.release_keep_alive(id, released);
  parts_.calls.complete(id, Completion{.status = CallStatus::kPeerLost, .why = "the connection was lost"}, released);
}

bool Sender::reject_oversized(const Connection& c, std::uint64_t id, Outgoing& m, Released& released) {
  if (fits(m, c.limits)) return false;
  parts_.overload.count_oversized(m, c.limits);
  std::string why = over_limits(m, c.limits, c.handshake.peer().name);
  if (id == 0) {  // internal messages are never that large: a bug
    parts_.queue.log("a message is not sent: " + why);
    return true;
  }
  if (m.header.flags & kMustDeliver && m.header.flags & kTrailer) {
    leave_out(m, LeftOut::kTooLarge, why);
    return false;
  }
  parts_.calls.release_keep_alive(id, released);
  parts_.calls.complete(id, Completion{.status = CallStatus::kTooLarge, .why = std::move(why)}, released);
  return true;
}

// ---- coalescing

/// Puts a message of a burst into the link's buffer, to be sent with those that follow. The last one (not `more`)
/// flushes the buffer. Returns false if the message is to be sent on its own.
bool Sender::coalesce(const ConnectionPtr& c, const Outgoing& m, bool more) {
  const Nanos at = more ? now() : 0;
  if ((more && !c->burst.in_burst(at)) || !c->link->buffer(m)) return false;
  if (++c->buffered >= kMaxBatch || !more) {
    c->buffered = 0;
    if (c->link->flush() == SendState::kBlocked) watch_writable(*c, true);
    return true;
  }
  if (std::exchange(c->coalescing, true)) return true;
  Lock lock(parts_.mutex);
  coalescing_.push_back(c);
  if (coalescing_since_.load(std::memory_order_relaxed) == kNever) {
    coalescing_since_.store(at, std::memory_order_relaxed);
    parts_.timer.arm(at + kHandoffDelay);
  }
  return true;
}

void Sender::flush_coalesced() {
  std::vector<ConnectionPtr> connections;
  {
    Lock lock(parts_.mutex);
    connections.swap(coalescing_);
    coalescing_since_.store(kNever, std::memory_order_relaxed);
  }
  for (const auto& c : connections) {
    MutexLock lock(c->send_mutex);
    c->coalescing = false;
    if (std::exchange(c->buffered, 0) > 0 && c->link->flush() == SendState::kBlocked) watch_writable(*c, true);
  }
}

// ---- waiting

void Sender::wait_until_sent(std::int32_t peer, Transmission& p, Nanos deadline,
                             const std::function<bool()>& interrupted) {
  if (p.pending_send && !wait_for_pending_send(peer, p, deadline, interrupted)) return;
  Waiter w;
  const auto done = [&p] { return has_left_queue(p); };
  if (parts_.leader.wait_for_progress(w, done, deadline, interrupted) != WaitEnd::kDone) copy_queued(p);
}

/// Waits until a message that waits for a connection is in the queue of one. Returns false if it has been sent or
/// dropped, or does not need the caller's memory any more.
bool Sender::wait_for_pending_send(std::int32_t peer, Transmission& p, Nanos deadline,
                                   const std::function<bool()>& interrupted) {
  Waiter w;
  auto moved = [&] { return p.pending_send->done || p.pending_send->connection; };
  auto may_proceed = [&] { return moved() || p.pending_send->expired; };
  const WaitEnd end = parts_.leader.wait_for_progress(w, may_proceed, deadline, interrupted);
  std::unique_ptr<Outgoing> m;
  Transmission again;
  {
    Lock lock(parts_.mutex);
    Peer* const found = parts_.peers.find(peer);
    if (found && (end != WaitEnd::kDone || p.pending_send->expired)) {
      auto taken = found->pending.take_if([&](auto& o) { return o.message->pending_send == p.pending_send; });
      if (!taken.empty()) {
        m = std::move(taken.front().message);
        again.until = taken.front().until;
        again.expired = taken.front().expired;
      }
    }
  }
  if (m) {
    const std::unique_ptr<KeepAlive> copied_owner = copy_payload(*m);
    m->admitted = false;  // it was only because a thread waited for it
    route(peer, m, again);
    return false;
  }
  Waiter moving;
  parts_.leader.wait_for_progress(moving, moved, kNever, {});  // it may be moving into the queue of a new connection
  Lock lock(parts_.mutex);
  p.connection = p.pending_send->connection;
  p.queue = p.pending_send->queue;
  p.ticket = p.pending_send->ticket;
  return !p.pending_send->done && p.connection;
}

void Sender::wait_until_reply_sent(PoolThread& self, const Transmission& p) {
  bool counted;
  {
    Lock lock(parts_.mutex);
    counted = parts_.queue.suspend(self);
  }
  const auto done = [&p] { return has_left_queue(p); };
  WaitEnd end;
  std::uint64_t before;
  do {
    Waiter w;
    before = p.connection->progress.load(std::memory_order_relaxed);
    end = parts_.leader.wait_for_progress(w, done, now() + kStallTimeout, {});
  } while (end == WaitEnd::kDeadline && p.connection->progress.load(std::memory_order_relaxed) != before);
  if (end != WaitEnd::kDone) {
    p.connection->stalled.store(true, std::memory_order_relaxed);
    copy_queued(p);
  }
  if (!counted) return;
  Lock lock(parts_.mutex);
  parts_.queue.resume(self);
}

/// Copies the unsent bytes of a queued message, so that it does not need the caller's memory any more.
void Sender::copy_queued(const Transmission& p) {
  std::unique_ptr<KeepAlive> copied_owner;
  MutexLock lock(p.connection->send_mutex);
  const std::uint64_t flushed = p.queue->flushed.load(std::memory_order_relaxed);
  auto& entries = p.queue->entries;
  if (p.ticket <= flushed || p.ticket - flushed > entries.size()) return;
  Outgoing& m = *entries[p.ticket - flushed - 1].message;
  m.stable = false;
  copied_owner = copy_payload(m);
  if (!copied_owner) return;
  m.admitted = false;  // it was only because a thread waited for it
  keep(*p.connection, m);
}

void Sender::watch_writable(Connection& c, bool on) {
  if (c.watching_writable == on) return;
  c.watching_writable = on;
  parts_.leader.set_writable(c.link->fd(), c.id, on);
}

// ---- flow control

bool Sender::may_send_now(std::int32_t peer, std::uint64_t payload) const {
  Lock lock(parts_.mutex);
  return parts_.overload.has_room(peer, weight(payload));
}

void Sender::count_over_window(Connection& c, std::int32_t peer, std::int64_t size) {
  const std::int64_t past = c.over_window.fetch_add(size, std::memory_order_relaxed) + size;
  if (past / kWindowWarningFactor < window_ || c.window_warning_logged.exchange(true, std::memory_order_relaxed))
    return;
  Lock lock(parts_.mutex);
  const Peer* found = parts_.peers.find(peer);
  const std::string name = found ? found->identity.name : "a worker";
  parts_.queue.log(
      "requests to " + name + " pile up: " + std::to_string(c.outstanding.load(std::memory_order_relaxed)) +
      " bytes wait at that worker, and more are being sent. Calls on a running event loop, in handlers and in "
      "callbacks do not wait for the receiver (request_window_bytes): await some results before making more calls.");
  parts_.queue.wake_for_work();
}

std::int64_t Sender::unread_replies(const Connection& c) {
  const std::int64_t waiting =
      c.unsent_replies.load(std::memory_order_relaxed) - c.large_reply.load(std::memory_order_relaxed);
  return waiting + static_cast<std::int64_t>(c.link->unread_bytes());
}

void Sender::check_reply_window(const ConnectionPtr& c, std::int64_t reply) {
  if (reply < kLargePayload && c->unsent_replies.load(std::memory_order_relaxed) <= window_) [[likely]]
    return;
  if (unread_replies(*c) <= window_) return;
  Lock lock(parts_.mutex);
  if (parts_.peers.has_connection(c->id)) parts_.queue.hold(c->id);
}

void Sender::release_held() {
  parts_.queue.release_if([this](std::uint64_t id) REQUIRES(engine_mutex) {
    const ConnectionPtr c = parts_.peers.find_connection(id);
    return !c || unread_replies(*c) <= window_ / 2;
  });
}

void Sender::send_window(const ConnectionPtr& c) {
  if (c->window_sent.exchange(true, std::memory_order_relaxed)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  m->header.call_id = static_cast<std::uint64_t>(window_);
  transmit(c, std::move(m));
}

void Sender::return_credit(const ConnectionPtr& c, std::int64_t size) {
  const std::int64_t due = c->credit_due.fetch_add(size, std::memory_order_relaxed) + size;
  const std::int64_t window = std::min(window_, c->peer_window.load(std::memory_order_relaxed));
  if (due == 0 || due < window / static_cast<std::int64_t>(kCreditShare)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  transmit(c, std::move(m));
}

void Sender::begin_item(Lock& lock, WorkItem& item) {
  ConnectionPtr c;
  if (item.kind == WorkKind::kRequest) c = parts_.peers.find_connection(item.connection);
  lock.unlock();
  if (item.kind != WorkKind::kRequest) return;
  const std::int64_t size = weight(item.message.payload_size());
  if (item.status != CallStatus::kPending) [[unlikely]] {
    const bool canceled = item.status == CallStatus::kCanceled;
    leave_out(item.message, canceled ? LeftOut::kCanceled : LeftOut::kExpired, *parts_.buffers);
  }
  if (c) return_credit(c, size);
}

void Sender::abandon_in_child() {
  new std::vector<ConnectionPtr>(std::move(coalescing_));  // never destroyed; the parent sends the buffered messages
  coalescing_.clear();
  coalescing_since_ = kNever;
}

}  // namespace telegrad

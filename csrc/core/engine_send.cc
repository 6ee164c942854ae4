// Sending: selection of the connection, queues, release of sent memory, and flow control.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr std::int64_t kWindowWarningFactor = 4;     // warn when requests exceed the window by this factor
constexpr Nanos kStallTimeout = 100 * kMillisecond;  // do not wait for a peer that has read nothing for this long
constexpr std::size_t kMaxBatch = 16;                // messages of a burst that are sent together
constexpr std::size_t kCreditShare = 4;              // report credit in a frame of its own at 1/4 of the window

void attach_credit(Connection& c, FrameHeader& header) {
  header.credit = static_cast<std::uint64_t>(c.credit_due.exchange(0, std::memory_order_relaxed));
}

}  // namespace

/// Sends on the peer's connection, or queues the message until there is one. `m` is empty if it was queued.
Engine::SendResult Engine::route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Transmission& transmission) {
  Released released;
  {
    Lock lock(mutex_);
    const std::uint64_t id = m->header.type == FrameType::kRequest ? m->header.call_id : 0;
    Call* call = id ? calls_.find(id) : nullptr;
    const bool pending = call && call->status == CallStatus::kPending;
    if (id && !pending && !(m->header.flags & kMustDeliver)) return SendResult::kDone;  // the call has already ended
    if (stopping()) {
      if (id)
        complete(id, Completion{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, released);
      release_keep_alive(id, released);
      return SendResult::kBroken;
    }
    auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.removed) {
      const std::string why = found == peers_.end() ? "no such worker" : found->second.last_error;
      if (id) complete(id, Completion{.status = CallStatus::kUnreachable, .why = why}, released);
      release_keep_alive(id, released);
      return SendResult::kBroken;
    }
    Peer& p = found->second;
    transmission.connection = p.link;
    if (!p.link) {
      if (transmission.copy) {
        if (auto copied_owner = copy_payload(*m)) transmission.copied_owner = std::move(copied_owner);
      } else if (!m->segments.empty() && !m->immutable) {
        transmission.pending_send = m->pending_send = std::make_shared<PendingSend>();
      }
      const bool wait_for_connection = !id || !pending || call->wait_for_connection;
      const Nanos until = wait_for_connection ? kNever : deadline_after(now(), settings_.connect_timeout);
      p.pending.push_back({.message = std::move(m), .until = until});
      arm_handshake_timer(until);
      if (!p.connecting) connect(lock, p);
      return SendResult::kQueued;
    }
    if (reject_oversized(*p.link, id, *m, released)) return id ? SendResult::kDone : SendResult::kBroken;
    if (call) call->connection = p.link->id;
    if (auto kept = keep_alives_.find(id); kept != keep_alives_.end()) kept->second.connection = p.link->id;
  }
  return transmit(transmission.connection, m, transmission);
}

/// kBroken means only that this message is lost. Frames that the peer sent before, above all its goodbye, are still
/// read; then the leader finds the end of the link and completes its calls.
Engine::SendResult Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p) {
  std::unique_lock lock(c->send_mutex, std::try_to_lock);
  if (!lock) {
    if (p.before_blocking && *p.before_blocking) (*p.before_blocking)();
    lock.lock();
  }
  return transmit_locked(c, m, p);
}

/// For messages that borrow no memory.
Engine::SendResult Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m) {
  Transmission p;
  return transmit(c, m, p);
}

/// Requires the connection's send_mutex.
Engine::SendResult Engine::transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p) {
  if (m->header.type == FrameType::kRequest) {
    c->outstanding.fetch_add(weight(m->payload_size()), std::memory_order_relaxed);
  }
  sent_messages_.fetch_add(1, std::memory_order_relaxed);
  if (c->state == Connection::State::kClosed) return SendResult::kBroken;
  if (const std::uint32_t name = m->header.name_id) {
    if (c->names_sent.size() <= name) c->names_sent.resize(name + 64);
    if (c->names_sent[name]) m->name = {};
    c->names_sent[name] = true;
  }
  if (!is_handshake(m->header.type)) attach_credit(*c, m->header);
  if (c->queue.empty()) {
    const bool with_others = c->buffered > 0 && m->header.type != FrameType::kGoodbye;  // a goodbye is flushed at once
    if ((p.may_coalesce || with_others) && coalesce(c, *m, p.may_coalesce)) return SendResult::kDone;
    c->buffered = 0;
    const SendState state = c->link->send(*m);
    if (state == SendState::kSent) return SendResult::kDone;
    if (state == SendState::kBroken) return SendResult::kBroken;
  }
  if (p.copy) {
    if (auto copied_owner = copy_payload(*m)) p.copied_owner = std::move(copied_owner);
  }
  const bool first = c->queue.empty();
  c->queue.push_back(std::move(m));
  p.ticket = ++c->queued;
  if (first) watch_writable(*c, c->link->waits_for_fd());
  return SendResult::kQueued;
}

/// Requires the connection's send_mutex. Sends messages that waited for the connection and notifies their senders.
void Engine::send_pending(const ConnectionPtr& c, std::deque<Peer::PendingMessage>& pending) {
  bool any_waits = false;
  for (auto& [m, until] : pending) {
    const auto pending_send = m->pending_send;
    Transmission p;
    const SendResult result = transmit_locked(c, m, p);
    if (!pending_send) continue;
    std::lock_guard lock(mutex_);
    pending_send->done = result != SendResult::kQueued;
    pending_send->connection = c;
    pending_send->ticket = p.ticket;
    any_waits = true;
  }
  if (!any_waits) return;
  std::lock_guard lock(mutex_);
  notify_progress();
}

/// Sends queued messages after the link has become writable.
void Engine::flush(const ConnectionPtr& c) {
  std::vector<std::unique_ptr<Outgoing>> done;
  {
    std::lock_guard lock(c->send_mutex);
    const bool buffered = c->link->flush() == SendState::kBlocked;
    bool waits_for_fd = true;
    c->progress.fetch_add(1, std::memory_order_relaxed);
    c->stalled.store(false, std::memory_order_relaxed);
    while (!buffered && !c->queue.empty()) {
      const SendState state = c->link->send(*c->queue.front());
      if (state == SendState::kBlocked) waits_for_fd = c->link->waits_for_fd();
      if (state != SendState::kSent) break;  // the leader reports a broken link
      done.push_back(std::move(c->queue.front()));
      c->queue.pop_front();
      c->flushed.fetch_add(1, std::memory_order_release);
    }
    watch_writable(*c, buffered || (!c->queue.empty() && waits_for_fd));
  }
  open_lanes(c);
  if (!done.empty()) {
    std::lock_guard lock(mutex_);
    notify_progress();
  }
}

/// Requires the connection's send_mutex. Puts a message of a burst into the link's buffer, to be sent with those that
/// follow. The last one (not `more`) flushes the buffer. Returns false if the message is to be sent on its own.
bool Engine::coalesce(const ConnectionPtr& c, const Outgoing& m, bool more) {
  const Nanos at = more ? now() : 0;
  if ((more && !c->burst.in_burst(at)) || !c->link->buffer(m)) return false;
  if (++c->buffered >= kMaxBatch || !more) {
    c->buffered = 0;
    if (c->link->flush() == SendState::kBlocked) watch_writable(*c, true);
    return true;
  }
  if (std::exchange(c->coalescing, true)) return true;
  std::lock_guard lock(mutex_);
  coalescing_.push_back(c);
  if (coalescing_since_.load(std::memory_order_relaxed) == kNever) {
    coalescing_since_.store(at, std::memory_order_relaxed);
    arm_timer(at + kHandoffDelay);
  }
  return true;
}

/// Flushes all coalesced messages. Takes the locks that it needs.
void Engine::flush_coalesced() {
  std::vector<ConnectionPtr> leading;
  {
    std::lock_guard lock(mutex_);
    leading.swap(coalescing_);
    coalescing_since_.store(kNever, std::memory_order_relaxed);
  }
  for (const auto& c : leading) {
    std::lock_guard lock(c->send_mutex);
    c->coalescing = false;
    if (std::exchange(c->buffered, 0) > 0 && c->link->flush() == SendState::kBlocked) watch_writable(*c, true);
  }
}

/// Waits until the memory of a message has been sent. If the wait ends earlier, the unsent bytes are copied, as the
/// message may still be sent.
void Engine::wait_until_sent(std::int32_t peer, Transmission& p, Nanos deadline,
                             const std::function<bool()>& interrupted) {
  if (p.pending_send && !wait_for_pending_send(peer, p, deadline, interrupted)) return;
  Waiter w;
  auto done = [&] {
    return p.connection->flushed.load(std::memory_order_acquire) >= p.ticket ||
           p.connection->state == Connection::State::kClosed;
  };
  if (wait_for(For::kProgress, w, done, deadline, interrupted) != WaitEnd::kDone) copy_queued(p.connection, p.ticket);
}

/// Waits until a message that waits for a connection is in the queue of one. Returns false if it has been sent or
/// dropped, or does not need the caller's memory any more.
bool Engine::wait_for_pending_send(std::int32_t peer, Transmission& p, Nanos deadline,
                                   const std::function<bool()>& interrupted) {
  Waiter w;
  auto moved = [&] { return p.pending_send->done || p.pending_send->connection; };
  auto may_proceed = [&] { return moved() || p.pending_send->expired; };
  const WaitEnd end = wait_for(For::kProgress, w, may_proceed, deadline, interrupted);
  std::unique_ptr<Outgoing> m;
  {
    std::lock_guard lock(mutex_);
    auto& pending = peers_[peer].pending;
    auto found = std::find_if(pending.begin(), pending.end(),
                              [&](auto& o) { return o.message->pending_send == p.pending_send; });
    if ((end != WaitEnd::kDone || p.pending_send->expired) && found != pending.end()) {
      m = std::move(found->message);
      pending.erase(found);
    }
  }
  if (m) {
    const std::unique_ptr<KeepAlive> copied_owner = copy_payload(*m);
    Transmission again;
    route(peer, m, again);
    return false;
  }
  Waiter again;
  wait_for(For::kProgress, again, moved, kNever, {});  // it may be moving into the queue of a new connection
  std::lock_guard lock(mutex_);
  p.connection = p.pending_send->connection;
  p.ticket = p.pending_send->ticket;
  return !p.pending_send->done && p.connection;
}

/// Waits, on a thread of the pool, until a queued reply is sent. The thread does not count as running a request,
/// because a peer that does not read its replies must not delay those of others.
void Engine::wait_until_reply_sent(PoolThread& self, const Transmission& p) {
  bool counted;
  {
    std::lock_guard lock(mutex_);
    counted = std::exchange(self.top_level, false);
    if (counted) --running_top_;
    if (counted && !top_.empty()) wake_for_work();
  }
  auto done = [&] {
    return p.connection->flushed.load(std::memory_order_acquire) >= p.ticket ||
           p.connection->state == Connection::State::kClosed;
  };
  WaitEnd end;
  std::uint64_t before;
  do {
    Waiter w;
    before = p.connection->progress.load(std::memory_order_relaxed);
    end = wait_for(For::kProgress, w, done, now() + kStallTimeout, {});
  } while (end == WaitEnd::kDeadline && p.connection->progress.load(std::memory_order_relaxed) != before);
  if (end != WaitEnd::kDone) {
    p.connection->stalled.store(true, std::memory_order_relaxed);
    copy_queued(p.connection, p.ticket);
  }
  if (!counted) return;
  std::lock_guard lock(mutex_);
  self.top_level = true;
  ++running_top_;
}

/// Copies the unsent bytes of a queued message, so that it does not need the caller's memory any more.
void Engine::copy_queued(const ConnectionPtr& c, std::uint64_t ticket) {
  std::unique_ptr<KeepAlive> copied_owner;
  std::lock_guard lock(c->send_mutex);
  const std::uint64_t flushed = c->flushed.load(std::memory_order_relaxed);
  if (ticket > flushed && ticket - flushed <= c->queue.size())
    copied_owner = copy_payload(*c->queue[ticket - flushed - 1]);
}

/// Requires the connection's send_mutex.
void Engine::watch_writable(Connection& c, bool on) {
  if (c.watching_writable == on) return;
  c.watching_writable = on;
  epoll_event event{.events = on ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN},
                    .data = {.u64 = c.id}};
  epoll_ctl(links_epoll_.get(), EPOLL_CTL_MOD, c.link->fd(), &event);
}

/// Returns whether a request of `size` bytes may be sent. Up to half the window any size may, so that large requests
/// are never stuck.
bool Engine::window_open(const Connection& c, std::int64_t size) const {
  const std::int64_t out = c.outstanding.load(std::memory_order_relaxed);
  return out <= settings_.window / 2 || out + size <= settings_.window;
}

bool Engine::may_send_now(std::int32_t peer, std::uint64_t payload) const {
  std::lock_guard lock(mutex_);
  auto found = peers_.find(peer);
  return found == peers_.end() || !found->second.link || window_open(*found->second.link, weight(payload));
}

/// Counts a request that is sent although the window is closed. Logs a warning once if these are many.
void Engine::count_over_window(Connection& c, std::int32_t peer, std::int64_t size) {
  const std::int64_t past = c.over_window.fetch_add(size, std::memory_order_relaxed) + size;
  if (past / kWindowWarningFactor < settings_.window ||
      c.window_warning_logged.exchange(true, std::memory_order_relaxed))
    return;
  std::lock_guard lock(mutex_);
  const auto found = peers_.find(peer);
  const std::string name = found == peers_.end() ? "a worker" : found->second.identity.name;
  log("requests to " + name + " pile up: " + std::to_string(c.outstanding.load(std::memory_order_relaxed)) +
      " bytes wait at that worker, and more are being sent. Calls on a running event loop, in handlers and in "
      "callbacks do not wait for the receiver (request_window_bytes): await some results before making more calls.");
  wake_for_work();
}

/// Sends this worker's window before it waits for the peer. The peer's own window may be so large that it would not
/// report such a small credit.
void Engine::send_window(const ConnectionPtr& c) {
  if (c->window_sent.exchange(true, std::memory_order_relaxed)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  m->header.call_id = static_cast<std::uint64_t>(settings_.window);
  transmit(c, std::move(m));
}

/// Counts a request as processed: its bytes no longer count against the sender.
void Engine::return_credit(const ConnectionPtr& c, std::int64_t size) {
  const std::int64_t due = c->credit_due.fetch_add(size, std::memory_order_relaxed) + size;
  const std::int64_t window = std::min(settings_.window, c->peer_window.load(std::memory_order_relaxed));
  if (due == 0 || due < window / static_cast<std::int64_t>(kCreditShare)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  transmit(c, std::move(m));
}

}  // namespace telegrad

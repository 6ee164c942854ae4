// Sending: selection of the connection, queues, release of sent memory, and flow control.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr std::int64_t kFarPast = 4;          // warn when requests exceed the window by this factor
constexpr Nanos kStall = 100 * kMillisecond;  // do not wait for a peer that has read nothing for this long
constexpr std::size_t kTogether = 16;         // messages of a burst that are sent together
constexpr std::size_t kCreditShare = 4;       // report credit in a frame of its own at 1/4 of the window

void make_credit_known(Connection& c, FrameHeader& header) {
  header.credit = static_cast<std::uint64_t>(c.credit_due.exchange(0, std::memory_order_relaxed));
}

}  // namespace

/// Sends on the peer's connection, or queues the message until there is one. `m` is empty if it was queued.
Engine::Sent Engine::route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Passage& passage) {
  Kept kept;
  {
    Lock lock(mutex_);
    const std::uint64_t id = m->header.type == FrameType::kRequest ? m->header.call_id : 0;
    Call* call = id ? calls_.find(id) : nullptr;
    const bool pending = call && call->status == CallStatus::kPending;
    if (id && !pending && !(m->header.flags & kMayLinger)) return Sent::kGone;  // the call has already ended
    if (stopping()) {
      if (id) settle(id, Outcome{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, kept);
      stop_lingering(id, kept);
      return Sent::kBroken;
    }
    auto found = peers_.find(peer);
    if (found == peers_.end() || found->second.forgotten) {
      const std::string why = found == peers_.end() ? "no such worker" : found->second.last_error;
      if (id) settle(id, Outcome{.status = CallStatus::kUnreachable, .why = why}, kept);
      stop_lingering(id, kept);
      return Sent::kBroken;
    }
    Peer& p = found->second;
    passage.via = p.link;
    if (!p.link) {
      if (passage.own) {
        if (auto spent = own_memory(*m)) passage.spent = std::move(spent);
      } else if (!m->segments.empty() && !m->owned) {
        passage.departure = m->departure = std::make_shared<Departure>();
      }
      const bool patient = !id || !pending || call->patient;
      const Nanos until = patient ? kNever : deadline_after(now(), settings_.connect_timeout);
      p.waiting.push_back({.message = std::move(m), .until = until});
      remind(until);
      if (!p.connecting) connect(lock, p);
      return Sent::kQueued;
    }
    if (refused(*p.link, id, *m, kept)) return id ? Sent::kGone : Sent::kBroken;
    if (call) call->connection = p.link->id;
    if (auto late = lingering_.find(id); late != lingering_.end()) late->second.connection = p.link->id;
  }
  return transmit(passage.via, m, passage);
}

/// kBroken means only that this message is lost. Frames that the peer sent before, above all its goodbye, are still
/// read; then the leader finds the end of the link and completes its calls.
Engine::Sent Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Passage& p) {
  std::unique_lock lock(c->send_mutex, std::try_to_lock);
  if (!lock) {
    if (p.before_blocking && *p.before_blocking) (*p.before_blocking)();
    lock.lock();
  }
  return transmit_locked(c, m, p);
}

/// For messages that borrow no memory.
Engine::Sent Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m) {
  Passage p;
  return transmit(c, m, p);
}

/// Requires the connection's send_mutex.
Engine::Sent Engine::transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Passage& p) {
  if (m->header.type == FrameType::kRequest) {
    c->outstanding.fetch_add(weight(m->payload_size()), std::memory_order_relaxed);
  }
  sent_messages_.fetch_add(1, std::memory_order_relaxed);
  if (c->state == Connection::State::kDead) return Sent::kBroken;
  if (const std::uint32_t name = m->header.name_id) {
    if (c->names_sent.size() <= name) c->names_sent.resize(name + 64);
    if (c->names_sent[name]) m->name = {};
    c->names_sent[name] = true;
  }
  if (!is_handshake(m->header.type)) make_credit_known(*c, m->header);
  if (c->queue.empty()) {
    const bool with_others = c->held > 0 && m->header.type != FrameType::kGoodbye;  // a goodbye is flushed at once
    if ((p.may_gather || with_others) && gather(c, *m, p.may_gather)) return Sent::kGone;
    c->held = 0;
    const SendState state = c->link->send(*m);
    if (state == SendState::kSent) return Sent::kGone;
    if (state == SendState::kBroken) return Sent::kBroken;
  }
  if (p.own) {
    if (auto spent = own_memory(*m)) p.spent = std::move(spent);
  }
  const bool first = c->queue.empty();
  c->queue.push_back(std::move(m));
  p.ticket = ++c->queued;
  if (first) watch_writable(*c, c->link->waits_for_fd());
  return Sent::kQueued;
}

/// Requires the connection's send_mutex. Sends messages that waited for the connection and notifies their senders.
void Engine::depart(const ConnectionPtr& c, std::deque<Peer::Waiting>& waiting) {
  bool told = false;
  for (auto& [m, until] : waiting) {
    const auto departure = m->departure;
    Passage p;
    const Sent sent = transmit_locked(c, m, p);
    if (!departure) continue;
    std::lock_guard lock(mutex_);
    departure->gone = sent != Sent::kQueued;
    departure->via = c;
    departure->ticket = p.ticket;
    told = true;
  }
  if (!told) return;
  std::lock_guard lock(mutex_);
  ring_progress();
}

/// Sends queued messages after the link has become writable.
void Engine::flush(const ConnectionPtr& c) {
  std::vector<std::unique_ptr<Outgoing>> gone;
  {
    std::lock_guard lock(c->send_mutex);
    const bool held = c->link->release() == SendState::kBlocked;
    bool waits_for_fd = true;
    c->progress.fetch_add(1, std::memory_order_relaxed);
    c->stalled.store(false, std::memory_order_relaxed);
    while (!held && !c->queue.empty()) {
      const SendState state = c->link->send(*c->queue.front());
      if (state == SendState::kBlocked) waits_for_fd = c->link->waits_for_fd();
      if (state != SendState::kSent) break;  // the leader reports a broken link
      gone.push_back(std::move(c->queue.front()));
      c->queue.pop_front();
      c->flushed.fetch_add(1, std::memory_order_release);
    }
    watch_writable(*c, held || (!c->queue.empty() && waits_for_fd));
  }
  widen(c);
  if (!gone.empty()) {
    std::lock_guard lock(mutex_);
    ring_progress();
  }
}

/// Requires the connection's send_mutex. Puts a message of a burst into the link's buffer, to be sent with those that
/// follow. The last one (not `more`) flushes the buffer. Returns false if the message is to be sent on its own.
bool Engine::gather(const ConnectionPtr& c, const Outgoing& m, bool more) {
  const Nanos at = more ? now() : 0;
  if ((more && !c->burst.goes_on(at)) || !c->link->hold(m)) return false;
  if (++c->held >= kTogether || !more) {
    c->held = 0;
    if (c->link->release() == SendState::kBlocked) watch_writable(*c, true);
    return true;
  }
  if (std::exchange(c->gathering, true)) return true;
  std::lock_guard lock(mutex_);
  gathering_.push_back(c);
  if (gathering_since_.load(std::memory_order_relaxed) == kNever) {
    gathering_since_.store(at, std::memory_order_relaxed);
    arm_timer(at + kGrace);
  }
  return true;
}

/// Flushes all coalesced messages. Takes the locks that it needs.
void Engine::release_gathered() {
  std::vector<ConnectionPtr> holding;
  {
    std::lock_guard lock(mutex_);
    holding.swap(gathering_);
    gathering_since_.store(kNever, std::memory_order_relaxed);
  }
  for (const auto& c : holding) {
    std::lock_guard lock(c->send_mutex);
    c->gathering = false;
    if (std::exchange(c->held, 0) > 0 && c->link->release() == SendState::kBlocked) watch_writable(*c, true);
  }
}

/// Waits until the memory of a message has been sent. If the wait ends earlier, the unsent bytes are copied, as the
/// message may still be sent.
void Engine::wait_until_gone(std::int32_t peer, Passage& p, Nanos deadline, const std::function<bool()>& interrupted) {
  if (p.departure && !wait_for_link(peer, p, deadline, interrupted)) return;
  Waiter w;
  auto gone = [&] {
    return p.via->flushed.load(std::memory_order_acquire) >= p.ticket || p.via->state == Connection::State::kDead;
  };
  if (wait_for(For::kProgress, w, gone, deadline, interrupted) != WaitEnd::kDone) own(p.via, p.ticket);
}

/// Waits until a message that waits for a connection is in the queue of one. Returns false if it has been sent or
/// dropped, or does not need the caller's memory any more.
bool Engine::wait_for_link(std::int32_t peer, Passage& p, Nanos deadline, const std::function<bool()>& interrupted) {
  Waiter w;
  auto moved = [&] { return p.departure->gone || p.departure->via; };
  auto over = [&] { return moved() || p.departure->late; };
  const WaitEnd end = wait_for(For::kProgress, w, over, deadline, interrupted);
  std::unique_ptr<Outgoing> m;
  {
    std::lock_guard lock(mutex_);
    auto& waiting = peers_[peer].waiting;
    auto found =
        std::find_if(waiting.begin(), waiting.end(), [&](auto& o) { return o.message->departure == p.departure; });
    if ((end != WaitEnd::kDone || p.departure->late) && found != waiting.end()) {
      m = std::move(found->message);
      waiting.erase(found);
    }
  }
  if (m) {
    const std::unique_ptr<Keep> spent = own_memory(*m);
    Passage again;
    route(peer, m, again);
    return false;
  }
  Waiter again;
  wait_for(For::kProgress, again, moved, kNever, {});  // it may be moving into the queue of a new connection
  std::lock_guard lock(mutex_);
  p.via = p.departure->via;
  p.ticket = p.departure->ticket;
  return !p.departure->gone && p.via;
}

/// Waits, on a thread of the pool, until a queued reply is sent. The thread does not count as running a request,
/// because a peer that does not read its replies must not delay those of others.
void Engine::wait_while_it_leaves(PoolThread& self, const Passage& p) {
  bool counted;
  {
    std::lock_guard lock(mutex_);
    counted = std::exchange(self.top_level, false);
    if (counted) --running_top_;
    if (counted && !top_.empty()) wake_for_work();
  }
  auto gone = [&] {
    return p.via->flushed.load(std::memory_order_acquire) >= p.ticket || p.via->state == Connection::State::kDead;
  };
  WaitEnd end;
  std::uint64_t before;
  do {
    Waiter w;
    before = p.via->progress.load(std::memory_order_relaxed);
    end = wait_for(For::kProgress, w, gone, now() + kStall, {});
  } while (end == WaitEnd::kDeadline && p.via->progress.load(std::memory_order_relaxed) != before);
  if (end != WaitEnd::kDone) {
    p.via->stalled.store(true, std::memory_order_relaxed);
    own(p.via, p.ticket);
  }
  if (!counted) return;
  std::lock_guard lock(mutex_);
  self.top_level = true;
  ++running_top_;
}

/// Copies the unsent bytes of a queued message, so that it does not need the caller's memory any more.
void Engine::own(const ConnectionPtr& c, std::uint64_t ticket) {
  std::unique_ptr<Keep> spent;
  std::lock_guard lock(c->send_mutex);
  const std::uint64_t flushed = c->flushed.load(std::memory_order_relaxed);
  if (ticket > flushed && ticket - flushed <= c->queue.size()) spent = own_memory(*c->queue[ticket - flushed - 1]);
}

/// Requires the connection's send_mutex.
void Engine::watch_writable(Connection& c, bool on) {
  if (c.watching_writable == on) return;
  c.watching_writable = on;
  epoll_event event{.events = on ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN},
                    .data = {.u64 = c.id}};
  epoll_ctl(inner_.get(), EPOLL_CTL_MOD, c.link->fd(), &event);
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
void Engine::pass_window(Connection& c, std::int32_t peer, std::int64_t size) {
  const std::int64_t past = c.past_window.fetch_add(size, std::memory_order_relaxed) + size;
  if (past / kFarPast < settings_.window || c.told_of_window.exchange(true, std::memory_order_relaxed)) return;
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
void Engine::tell_window(const ConnectionPtr& c) {
  if (c->window_known.exchange(true, std::memory_order_relaxed)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  m->header.call_id = static_cast<std::uint64_t>(settings_.window);
  transmit(c, std::move(m));
}

/// Counts a request as processed: its bytes no longer count against the sender.
void Engine::take_up(const ConnectionPtr& c, std::int64_t size) {
  const std::int64_t due = c->credit_due.fetch_add(size, std::memory_order_relaxed) + size;
  const std::int64_t window = std::min(settings_.window, c->peer_window.load(std::memory_order_relaxed));
  if (due == 0 || due < window / static_cast<std::int64_t>(kCreditShare)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  transmit(c, std::move(m));
}

}  // namespace telegrad

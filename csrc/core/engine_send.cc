// Sending: the way to a peer, messages that wait for their link, memory that is lent until it has left, flow control.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr std::int64_t kFarPast = 4;          // windows' worth of requests that did not wait for it
constexpr Nanos kStall = 100 * kMillisecond;  // a peer that has read nothing for so long is not waited for
constexpr std::size_t kTogether = 16;         // messages of a burst that leave as one
constexpr std::size_t kCreditShare = 4;       // credit is told on its own when a window's fourth is due

void make_credit_known(Connection& c, FrameHeader& header) {
  header.credit = static_cast<std::uint64_t>(c.credit_due.exchange(0, std::memory_order_relaxed));
}

}  // namespace

/// Sends on the peer's link, or keeps the message until there is one. `m` is empty if it was queued.
Engine::Sent Engine::route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Passage& passage) {
  Kept kept;
  {
    Lock lock(mutex_);
    const std::uint64_t id = m->header.type == FrameType::kRequest ? m->header.call_id : 0;
    Call* call = id ? calls_.find(id) : nullptr;
    const bool pending = call && call->status == CallStatus::kPending;
    if (id && !pending && !(m->header.flags & kMayLinger)) return Sent::kGone;  // over before it began
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

/// kBroken says only that this message is gone: what the peer sent before it went, its goodbye above all, is still to
/// be read, and then whoever polls finds the link's end and settles its calls.
Engine::Sent Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Passage& p) {
  std::unique_lock lock(c->send_mutex, std::try_to_lock);
  if (!lock) {
    if (p.before_blocking && *p.before_blocking) (*p.before_blocking)();
    lock.lock();
  }
  return transmit_locked(c, m, p);
}

/// For what lends no memory.
Engine::Sent Engine::transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m) {
  Passage p;
  return transmit(c, m, p);
}

/// With the connection's send_mutex held.
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
    const bool with_others = c->held > 0 && m->header.type != FrameType::kGoodbye;  // whose leaving is waited for
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

/// With the connection's send_mutex held: what has waited for a link goes, and who lent its memory hears of it.
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

/// The link takes bytes again.
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
      if (state != SendState::kSent) break;  // if broken, the reader will hear of it
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

/// With the connection's send_mutex held: leaves a message of a burst with the link, to go with others that follow.
/// The last one takes them along. False: it is to be sent by itself.
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

/// What has been held for others to leave with leaves. Without locks.
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

/// Waits until a message has left the memory it was sent from. Who stops waiting before that has it copied, for the
/// message may leave all the same.
void Engine::wait_until_gone(std::int32_t peer, Passage& p, Nanos deadline, const std::function<bool()>& interrupted) {
  if (p.departure && !wait_for_link(peer, p, deadline, interrupted)) return;
  Waiter w;
  auto gone = [&] {
    return p.via->flushed.load(std::memory_order_acquire) >= p.ticket || p.via->state == Connection::State::kDead;
  };
  if (wait_for(For::kProgress, w, gone, deadline, interrupted) != WaitEnd::kDone) own(p.via, p.ticket);
}

/// Waits until a message that waits for a link is in the queue of one. False: it has left, or been dropped, or it does
/// not need the memory any more.
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
  wait_for(For::kProgress, again, moved, kNever, {});  // it may be on its way into the queue of a fresh link
  std::lock_guard lock(mutex_);
  p.via = p.departure->via;
  p.ticket = p.departure->ticket;
  return !p.departure->gone && p.via;
}

/// A thread of the pool waits for a queued reply, without counting as one that runs a request: whoever does not read
/// its replies must not keep others from having theirs.
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

/// What is left of a queued message no longer needs the memory it was lent.
void Engine::own(const ConnectionPtr& c, std::uint64_t ticket) {
  std::unique_ptr<Keep> spent;
  std::lock_guard lock(c->send_mutex);
  const std::uint64_t flushed = c->flushed.load(std::memory_order_relaxed);
  if (ticket > flushed && ticket - flushed <= c->queue.size()) spent = own_memory(*c->queue[ticket - flushed - 1]);
}

/// With the connection's send_mutex held.
void Engine::watch_writable(Connection& c, bool on) {
  if (c.watching_writable == on) return;
  c.watching_writable = on;
  epoll_event event{.events = on ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN},
                    .data = {.u64 = c.id}};
  epoll_ctl(inner_.get(), EPOLL_CTL_MOD, c.link->fd(), &event);
}

/// May a request of `size` bytes go? Half the window is open to a request of any size, so that large ones pass.
bool Engine::window_open(const Connection& c, std::int64_t size) const {
  const std::int64_t out = c.outstanding.load(std::memory_order_relaxed);
  return out <= settings_.window / 2 || out + size <= settings_.window;
}

bool Engine::may_send_now(std::int32_t peer, std::uint64_t payload) const {
  std::lock_guard lock(mutex_);
  auto found = peers_.find(peer);
  return found == peers_.end() || !found->second.link || window_open(*found->second.link, weight(payload));
}

/// A request goes that does not wait for the window, which is closed. Says so once if that goes far.
void Engine::pass_window(Connection& c, std::int32_t peer, std::int64_t size) {
  const std::int64_t past = c.past_window.fetch_add(size, std::memory_order_relaxed) + size;
  if (past / kFarPast < settings_.window || c.told_of_window.exchange(true, std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  const auto found = peers_.find(peer);
  const std::string name = found == peers_.end() ? "a worker" : found->second.identity.name;
  log("requests to " + name + " pile up: " + std::to_string(c.outstanding.load(std::memory_order_relaxed)) +
      " bytes wait there, and more keep coming. Calls on a running event loop, in handlers and in callbacks do not "
      "wait "
      "for the other end to keep up (request_window_bytes): await some results before making more.");
  wake_for_work();
}

/// This worker is about to wait for the peer, whose own window may be so large that it would not tell of so little.
void Engine::tell_window(const ConnectionPtr& c) {
  if (c->window_known.exchange(true, std::memory_order_relaxed)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  m->header.call_id = static_cast<std::uint64_t>(settings_.window);
  transmit(c, std::move(m));
}

/// A request has been taken up: its bytes no longer count against the sender.
void Engine::take_up(const ConnectionPtr& c, std::int64_t size) {
  const std::int64_t due = c->credit_due.fetch_add(size, std::memory_order_relaxed) + size;
  const std::int64_t window = std::min(settings_.window, c->peer_window.load(std::memory_order_relaxed));
  if (due == 0 || due < window / static_cast<std::int64_t>(kCreditShare)) return;
  auto m = std::make_unique<Outgoing>();
  m->header.type = FrameType::kCredit;
  transmit(c, std::move(m));
}

}  // namespace telegrad

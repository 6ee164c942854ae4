// The threads of the pool, and the timer thread. See engine.h.
#include <sys/epoll.h>

#include <algorithm>

#include "core/engine.h"
#include "core/wakeup_fd.h"

namespace telegrad {
namespace {

constexpr Nanos kIdleThreadTimeout = 10 * kSecond;  // a pool thread that has been idle for this long exits

thread_local PoolThread* current = nullptr;

}  // namespace

PoolThread::~PoolThread() {
  if (current == this) current = nullptr;
}

/// Returns the calling thread if it belongs to the pool, else null.
PoolThread* Engine::this_thread() const { return current && current->engine == this ? current : nullptr; }

bool Engine::pop(PoolThread& self, WorkItem& out) {
  std::deque<WorkItem>* queue = has_urgent()         ? &urgent_
                                : !nested_.empty()   ? &nested_
                                : has_work()         ? &top_
                                : !deferred_.empty() ? &deferred_
                                                     : nullptr;
  if (!queue) {
    if (!urgent_.empty())
      arm_timer(completion_taken_at_ + kCompletionDelay);  // the thread that runs completions may be blocked
    return false;
  }
  popped_at_ = now();
  out = std::move(queue->front());
  queue->pop_front();
  self.running = true;
  self.top_level = queue == &top_;
  ++running_;
  if (self.top_level) ++running_top_;
  self.kind = out.kind;
  if (self.kind == WorkKind::kRequest) ++running_requests_;
  if (self.kind == WorkKind::kCompletion) {
    ++running_completions_;
    completion_taken_at_ = popped_at_;
  }
  self.runs_peer_event =
      self.kind == WorkKind::kEvent && out.event != EventKind::kCallback && out.event != EventKind::kLog;
  out.needs_thread = running_ >= threads_ && !thread_starting_;
  if (out.needs_thread) thread_starting_ = true;
  if (has_work()) arm_timer(now() + kHandoffDelay);
  return true;
}

/// Requires mutex_. Registers a thread that is new, or that has finished its item.
void Engine::enter_pool(PoolThread& self) {
  if (!self.known) {
    self.known = true;
    self.engine = this;
    current = &self;
    self.spin = Spin(settings_.spin);
    ++threads_;
    thread_starting_ = false;
  }
  if (self.running) {
    self.running = false;
    --running_;
    if (self.top_level) --running_top_;
    if (self.kind == WorkKind::kRequest) --running_requests_;
    if (self.kind == WorkKind::kCompletion) --running_completions_;
    if (self.runs_peer_event) finish_peer_event();
  }
}

/// Requires mutex_. Queues a peer event. The pool runs peer events one at a time.
void Engine::queue_peer_event(WorkItem&& event) {
  if (peer_event_running_) {
    peer_events_.push_back(std::move(event));
  } else {
    peer_event_running_ = true;
    push(std::move(event));
  }
}

/// Requires mutex_. Queues the next peer event after one has been processed.
void Engine::finish_peer_event() {
  peer_event_running_ = false;
  if (peer_events_.empty()) return;
  WorkItem next = std::move(peer_events_.front());
  peer_events_.pop_front();
  queue_peer_event(std::move(next));
}

void Engine::spawn_failed() {
  std::lock_guard lock(mutex_);
  thread_starting_ = false;
}

bool Engine::try_next(PoolThread& self, WorkItem& out) {
  Lock lock(mutex_);
  if (!self.known) return false;
  enter_pool(self);
  if (!pop(self, out)) return false;
  begin_item(lock, out);
  return true;
}

bool Engine::next(PoolThread& self, WorkItem& out) {
  std::vector<ConnectionPtr> closed;
  Lock lock(mutex_);
  enter_pool(self);
  bool leading = false;
  LeaderHandoff::Term term = LeaderHandoff::kCallerTerm;
  Spin no_spin(0);
  while (true) {
    if (stopped_ && !has_urgent()) {
      if (leading) resign(false);
      if (!has_leader_) closed = reap_closed();  // no thread will poll again
      --threads_;
      return false;
    }
    if (pop(self, out)) {
      if (leading) resign(true);
      break;
    }
    if (leading || !has_leader_) {
      if (!leading) {
        become_leader();
        term = handoff_.begin_term();
      }
      Spin& spin = running_ < spin_limit_ ? self.spin : no_spin;
      lock.unlock();
      const bool found = poll(spin, kNever, false, term);
      lock.lock();
      leading = handoff_.is_current(term);
      if (leading && handoff_.is_wanted()) {
        leading = false;
        resign(false);
      }
      if (found || has_work() || stopped_) continue;
      if (leading) {
        leading = has_leader_ = false;
        handoff_.end_term();
      }
    }
    if (!parked_) {
      park(lock, self);
      continue;
    }
    if (!has_leader_) set_links_watched(true);  // the parked thread watches; this thread is a further idle one
    if (!sleep_idle(lock, self)) {
      --threads_;
      out.kind = WorkKind::kExitThread;
      return true;
    }
  }
  begin_item(lock, out);
  return true;
}

/// Releases the mutex before the thread runs `item`.
void Engine::begin_item(Lock& lock, const WorkItem& item) {
  ConnectionPtr c;
  if (item.kind == WorkKind::kRequest) {
    if (auto found = connections_.find(item.connection); found != connections_.end()) c = found->second;
  }
  lock.unlock();
  if (c) return_credit(c, weight(item.message.payload_size()));
}

/// Sleeps in epoll until there is work for this thread, or until a link has data while there is no leader.
void Engine::park(Lock& lock, PoolThread& self) {
  parked_ = &self;
  if (is_running_completions() &&
      !has_leader_) {          // the thread that runs completions polls next, this one only after a while
    set_links_watched(false);  // `on_timer` arms the wake-up of the links when it enables `links_epoll_` again
    released_at_ = now();
    arm_timer(released_at_ + handoff_delay_);
  } else {
    set_links_watched(!has_leader_);
  }
  lock.unlock();
  const Nanos start = now();
  epoll_event events[2];
  const int n = epoll_wait(park_epoll_.get(), events, 2, -1);
  if (n > 0) self.spin.slept(now() - start);
  lock.lock();
  parked_ = nullptr;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kParkToken) drain_fd(park_fd_.get());
  }
}

/// Sleeps on the thread's parker. Returns false if the thread was idle for so long that it may exit.
bool Engine::sleep_idle(Lock& lock, PoolThread& self) {
  self.parker.reset();
  idle_.push_back(&self);
  const bool stays = threads_ - running_ <= 2;  // if more threads become idle, those exit
  lock.unlock();
  const Nanos start = now();
  self.parker.wait(stays ? kNever : start + kIdleThreadTimeout);
  self.spin.slept(now() - start);
  lock.lock();
  std::erase(idle_, &self);
  return self.parker.is_notified() || has_work() || stopped_ || threads_ - running_ <= 2;
}

// ---- time

void Engine::arm_timer(Nanos at) {
  if (at >= timer_at_) return;
  timer_at_ = at;
  arm_timerfd(timer_fd_.get(), at + kTimerSlack);
}

/// Runs the timer if it is due. Leader only, while no lock is held.
void Engine::on_timer_if_due(Nanos at) {
  if (at < timer_at_.load(std::memory_order_relaxed)) return;
  Lock lock(mutex_);
  on_timer(lock);
}

void Engine::run_timer() {
  while (true) {
    std::uint64_t expirations;
    if (::read(timer_fd_.get(), &expirations, sizeof expirations) < 0 && errno != EINTR) return;
    Lock lock(mutex_);
    if (timer_stopped_) return;
    on_timer(lock);
  }
}

void Engine::on_timer(Lock& lock) {
  Released released;
  std::vector<ConnectionPtr> lending;
  bool trims = false;
  const Nanos at = now();
  timer_at_ = kNever;
  expire_calls(at, released);
  if (at >= handshake_timer_at_) expire_handshakes(lock, at);
  arm_timer(handshake_timer_at_);
  if (!has_leader_) {
    const bool watched = parked_ && links_watched_;
    if (!watched && at - released_at_ >= handoff_delay_) {
      handoff_delay_ = kHandoffDelay;
      watch_links();
    } else if (!watched) {
      handoff_delay_ = kMaxHandoffDelay;
      arm_timer(released_at_ + handoff_delay_);
    }
  } else {
    handoff_delay_ = kMaxHandoffDelay;
  }
  if (!deferred_.empty()) {
    if (at - deferred_.front().since >= kDeferDelay) {
      flush_deferred();
    } else {
      arm_timer(deferred_.front().since + kDeferDelay);
    }
  }
  if (!urgent_.empty() || has_requests()) {
    const Nanos oldest =
        std::min({urgent_.empty() ? kNever : urgent_.front().since, nested_.empty() ? kNever : nested_.front().since,
                  top_.empty() ? kNever : top_.front().since});
    if (at - std::max(oldest, popped_at_) >= kHandoffDelay) wake_for_work();
    if (!idle_.empty() || parked_) arm_timer(at + (has_requests() ? kHandoffDelay : kCompletionDelay));
  }
  const bool lends = std::any_of(connections_.begin(), connections_.end(),
                                 [](const auto& c) { return c.second->link->lease_capacity() > 0; });
  if (lends || multicast_arena_->size() > 0 || pool_->stats().cached_blocks > 0) {
    if (at >= trim_at_) {
      pool_->trim(at - kTrimInterval);
      trims = true;
      for (auto& [token, c] : connections_) lending.push_back(c);
      trim_at_ = at + kTrimInterval;
    }
    arm_timer(trim_at_);
  }
  arm_timer(calls_.next_deadline());
  const Nanos since = coalescing_since_.load(std::memory_order_relaxed);
  const bool coalesced = at >= since && at - since >= kHandoffDelay;
  if (since != kNever && !coalesced) arm_timer(since + kHandoffDelay);
  lock.unlock();
  if (coalesced) flush_coalesced();
  if (trims) multicast_arena_->trim(at - kTrimInterval);
  for (const auto& c : lending) c->link->trim(at - kTrimInterval);
  released.clear();
}

}  // namespace telegrad

// The threads of the pool, and the timer thread. See engine.h.
#include <sys/epoll.h>

#include <algorithm>

#include "core/bells.h"
#include "core/engine.h"

namespace telegrad {
namespace {

constexpr Nanos kRetire = 10 * kSecond;  // a pool thread that has been idle for this long exits

thread_local PoolThread* current = nullptr;

}  // namespace

PoolThread::~PoolThread() {
  if (current == this) current = nullptr;
}

/// Returns the calling thread if it belongs to the pool, else null.
PoolThread* Engine::this_thread() const { return current && current->engine == this ? current : nullptr; }

bool Engine::pop(PoolThread& self, Item& out) {
  std::deque<Item>* queue = has_urgent()       ? &urgent_
                            : !nested_.empty() ? &nested_
                            : has_work()       ? &top_
                            : !lazy_.empty()   ? &lazy_
                                               : nullptr;
  if (!queue) {
    if (!urgent_.empty()) arm_timer(finished_at_ + kOutcomeGrace);  // the thread that runs completions may be blocked
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
  if (self.kind == ItemKind::kRequest) ++running_requests_;
  if (self.kind == ItemKind::kOutcome) {
    ++finishing_;
    finished_at_ = popped_at_;
  }
  self.tells = self.kind == ItemKind::kEvent && out.event != EventKind::kNudge && out.event != EventKind::kLog;
  out.spawn = running_ >= threads_ && !spawning_;
  if (out.spawn) spawning_ = true;
  if (has_work()) arm_timer(now() + kGrace);
  return true;
}

/// Requires mutex_. Registers a thread that is new, or that has finished its item.
void Engine::arrive(PoolThread& self) {
  if (!self.known) {
    self.known = true;
    self.engine = this;
    current = &self;
    self.spin = Spin(settings_.spin);
    ++threads_;
    spawning_ = false;
  }
  if (self.running) {
    self.running = false;
    --running_;
    if (self.top_level) --running_top_;
    if (self.kind == ItemKind::kRequest) --running_requests_;
    if (self.kind == ItemKind::kOutcome) --finishing_;
    if (self.tells) told();
  }
}

/// Requires mutex_. Queues a peer event. The pool runs peer events one at a time.
void Engine::tell(Item&& news) {
  if (telling_) {
    news_.push_back(std::move(news));
  } else {
    telling_ = true;
    push(std::move(news));
  }
}

/// Requires mutex_. Queues the next peer event after one has been processed.
void Engine::told() {
  telling_ = false;
  if (news_.empty()) return;
  Item next = std::move(news_.front());
  news_.pop_front();
  tell(std::move(next));
}

void Engine::not_spawned() {
  std::lock_guard lock(mutex_);
  spawning_ = false;
}

bool Engine::try_next(PoolThread& self, Item& out) {
  Lock lock(mutex_);
  if (!self.known) return false;
  arrive(self);
  if (!pop(self, out)) return false;
  leave(lock, out);
  return true;
}

bool Engine::next(PoolThread& self, Item& out) {
  std::vector<ConnectionPtr> dead;
  Lock lock(mutex_);
  arrive(self);
  bool holding = false;
  Gate::Pass pass = Gate::kCaller;
  Spin no_spin(0);
  while (true) {
    if (stopped_ && !has_urgent()) {
      if (holding) release_role(false);
      if (!role_held_) dead = forget_dead();  // no thread will poll again
      --threads_;
      return false;
    }
    if (pop(self, out)) {
      if (holding) release_role(true);
      break;
    }
    if (holding || !role_held_) {
      if (!holding) {
        take_role();
        pass = gate_.open();
      }
      Spin& spin = running_ < spinning_ ? self.spin : no_spin;
      lock.unlock();
      const bool found = poll(spin, kNever, false, pass);
      lock.lock();
      holding = gate_.holds(pass);
      if (holding && gate_.wanted()) {
        holding = false;
        release_role(false);
      }
      if (found || has_work() || stopped_) continue;
      if (holding) {
        holding = role_held_ = false;
        gate_.shut();
      }
    }
    if (!parked_) {
      park(lock, self);
      continue;
    }
    if (!role_held_) set_outer(true);  // the parked thread watches; this thread is a further idle one
    if (!idle(lock, self)) {
      --threads_;
      out.kind = ItemKind::kRetire;
      return true;
    }
  }
  leave(lock, out);
  return true;
}

/// Releases the mutex before the thread runs `item`.
void Engine::leave(Lock& lock, const Item& item) {
  ConnectionPtr c;
  if (item.kind == ItemKind::kRequest) {
    if (auto found = connections_.find(item.connection); found != connections_.end()) c = found->second;
  }
  lock.unlock();
  if (c) take_up(c, weight(item.message.payload_size()));
}

/// Sleeps in epoll until there is work for this thread, or until a link has data while there is no leader.
void Engine::park(Lock& lock, PoolThread& self) {
  parked_ = &self;
  if (finishes_calls() && !role_held_) {  // the thread that runs completions polls next, this one only after a while
    set_outer(false);                     // `tick` arms the wake-up of the links when it enables `inner_` again
    released_at_ = now();
    arm_timer(released_at_ + grace_);
  } else {
    set_outer(!role_held_);
  }
  lock.unlock();
  const Nanos start = now();
  epoll_event events[2];
  const int n = epoll_wait(outer_.get(), events, 2, -1);
  if (n > 0) self.spin.slept(now() - start);
  lock.lock();
  parked_ = nullptr;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kParkToken) drain(park_bell_.get());
  }
}

/// Sleeps on the thread's parker. Returns false if the thread was idle for so long that it may exit.
bool Engine::idle(Lock& lock, PoolThread& self) {
  self.bell.reset();
  idle_.push_back(&self);
  const bool stays = threads_ - running_ <= 2;  // if more threads become idle, those exit
  lock.unlock();
  const Nanos start = now();
  self.bell.wait(stays ? kNever : start + kRetire);
  self.spin.slept(now() - start);
  lock.lock();
  std::erase(idle_, &self);
  return self.bell.rung() || has_work() || stopped_ || threads_ - running_ <= 2;
}

// ---- time

void Engine::arm_timer(Nanos at) {
  if (at >= timer_at_) return;
  timer_at_ = at;
  ring_at(timer_.get(), at + kTimerSlack);
}

/// Runs the timer if it is due. Leader only, while no lock is held.
void Engine::tick_if_due(Nanos at) {
  if (at < timer_at_.load(std::memory_order_relaxed)) return;
  Lock lock(mutex_);
  tick(lock);
}

void Engine::keep_time() {
  while (true) {
    std::uint64_t expirations;
    if (::read(timer_.get(), &expirations, sizeof expirations) < 0 && errno != EINTR) return;
    Lock lock(mutex_);
    if (quit_) return;
    tick(lock);
  }
}

void Engine::tick(Lock& lock) {
  Kept kept;
  std::vector<ConnectionPtr> lending;
  bool trims = false;
  const Nanos at = now();
  timer_at_ = kNever;
  expire_calls(at, kept);
  if (at >= handshakes_at_) expire_handshakes(lock, at);
  arm_timer(handshakes_at_);
  if (!role_held_) {
    const bool watched = parked_ && in_outer_;
    if (!watched && at - released_at_ >= grace_) {
      grace_ = kGrace;
      watch();
    } else if (!watched) {
      grace_ = kMostGrace;
      arm_timer(released_at_ + grace_);
    }
  } else {
    grace_ = kMostGrace;
  }
  if (!lazy_.empty()) {
    if (at - lazy_.front().since >= kLazyGrace) {
      hurry_lazy();
    } else {
      arm_timer(lazy_.front().since + kLazyGrace);
    }
  }
  if (!urgent_.empty() || has_requests()) {
    const Nanos oldest =
        std::min({urgent_.empty() ? kNever : urgent_.front().since, nested_.empty() ? kNever : nested_.front().since,
                  top_.empty() ? kNever : top_.front().since});
    if (at - std::max(oldest, popped_at_) >= kGrace) wake_for_work();
    if (!idle_.empty() || parked_) arm_timer(at + (has_requests() ? kGrace : kOutcomeGrace));
  }
  const bool lends = std::any_of(connections_.begin(), connections_.end(),
                                 [](const auto& c) { return c.second->link->lendable() > 0; });
  if (lends || commons_->size() > 0 || pool_->stats().cached_blocks > 0) {
    if (at >= trim_at_) {
      pool_->trim(at - kTrim);
      trims = true;
      for (auto& [token, c] : connections_) lending.push_back(c);
      trim_at_ = at + kTrim;
    }
    arm_timer(trim_at_);
  }
  arm_timer(calls_.next_deadline());
  const Nanos since = gathering_since_.load(std::memory_order_relaxed);
  const bool gathered = at >= since && at - since >= kGrace;
  if (since != kNever && !gathered) arm_timer(since + kGrace);
  lock.unlock();
  if (gathered) release_gathered();
  if (trims) commons_->trim(at - kTrim);
  for (const auto& c : lending) c->link->trim(at - kTrim);
  kept.clear();
}

}  // namespace telegrad

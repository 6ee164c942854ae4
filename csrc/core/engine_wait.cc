// Leadership, polling of links, and waiting callers. See engine.h.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/bells.h"
#include "core/engine.h"

namespace telegrad {
namespace {

constexpr Nanos kSlice = kSecond;            // longest sleep that checks for signals afterwards
constexpr std::size_t kMuch = 1 << 20;       // bytes of a tensor for which lanes may pay
constexpr std::size_t kBudget = 4 << 20;     // bytes read from one link before the others are read
constexpr std::uint32_t kHotTurns = 16;      // polls of the last active link alone before all links are polled
constexpr std::uint32_t kGlances = 128;      // polls of busy-polled links alone before all links are polled
constexpr int kStrangersBeforeHandover = 2;  // requests that a waiting caller reads before the pool polls

int milliseconds(Nanos until) {
  if (until == kNever) return -1;
  const Nanos left = until - now();
  return left <= 0 ? 0 : static_cast<int>(std::min<Nanos>((left + kMillisecond - 1) / kMillisecond, 1'000'000'000));
}

}  // namespace

// ---- leadership. All require mutex_.

void Engine::set_outer(bool enabled) {
  if (enabled && !put_to_sleep()) kick();  // a link has a message: the parked thread must poll
  if (in_outer_ == enabled) return;
  epoll_event event{.events = enabled ? static_cast<std::uint32_t>(EPOLLIN) : 0u, .data = {.u64 = kInnerToken}};
  epoll_ctl(outer_.get(), EPOLL_CTL_MOD, inner_.get(), &event);
  in_outer_ = enabled;
}

void Engine::take_role() {
  role_held_ = true;
  if (parked_) set_outer(false);
}

/// Ends leadership. `to_user_code`: a pool thread runs an item and will return; any other thread may not.
void Engine::release_role(bool to_user_code) {
  role_held_ = false;
  gate_.shut();
  released_at_ = now();
  if (!to_user_code && !sleepers_.empty()) {
    Waiter* next = sleepers_.front();
    role_held_ = true;
    next->promoted = true;
    next->bell.ring();
  } else if (!to_user_code && calls_.waiting_async() > 0) {
    watch();
  } else {
    arm_timer(released_at_ + grace_);
  }
}

/// Ensures that a thread is woken when a link has data while there is no leader.
void Engine::watch() {
  if (parked_) {
    set_outer(true);
  } else if (!sleepers_.empty()) {
    Waiter* next = sleepers_.front();
    role_held_ = true;
    next->promoted = true;
    next->bell.ring();
  } else if (!idle_.empty()) {
    idle_.back()->bell.ring();
  }
}

/// Busy polls the connection on which the leader is about to wait, so that the peer need not wake it.
void Engine::stay_awake_for(std::uint64_t connection) {
  ConnectionPtr c = hot_ && hot_->id == connection ? hot_ : nullptr;
  if (auto found = connections_.find(connection); !c && found != connections_.end()) c = found->second;
  if (c && !c->awake) stay_awake(c);
}

void Engine::stay_awake(const ConnectionPtr& c) {
  if (!c->link->stay_awake()) return;
  c->awake = true;
  awake_.push_back(c);
}

/// Returns whether one more thread should take an item now. A thread that runs completions also takes the next ones,
/// unless it is blocked: while the program holds the GIL, more threads would only queue for it.
bool Engine::has_work() const { return has_requests() || has_urgent(); }

bool Engine::has_urgent() const {
  return !urgent_.empty() && (urgent_.front().kind != ItemKind::kOutcome || !finishes_calls());
}

/// Returns whether a thread of the pool is running completions and is not blocked.
bool Engine::finishes_calls() const { return finishing_ > 0 && now() - finished_at_ < kOutcomeGrace; }

bool Engine::has_requests() const { return !nested_.empty() || (!top_.empty() && running_top_ < settings_.handlers); }

void Engine::push(Item&& item) {
  if (item.since == 0) item.since = now();
  std::deque<Item>& queue = item.kind != ItemKind::kRequest       ? urgent_
                            : item.message.header.flags & kNested ? nested_
                                                                  : top_;
  queue.push_back(std::move(item));
  if (!role_held_) arm_timer(now() + kGrace);
}

/// Queues the deferred completions for the pool.
void Engine::hurry_lazy() {
  if (lazy_.empty()) return;
  std::move(lazy_.begin(), lazy_.end(), std::back_inserter(urgent_));
  lazy_.clear();
  has_lazy_.store(false, std::memory_order_relaxed);
  wake_for_work();
}

/// Wakes a thread of the pool if there is work that the calling thread will not do.
void Engine::wake_for_work() {
  if (!has_work()) return;
  if (!idle_.empty()) {
    idle_.back()->bell.ring();
  } else if (parked_) {
    ring_park();
  } else {
    arm_timer(now() + kGrace);
  }
}

/// Wakes the threads that wait for credit or for bytes to be sent.
void Engine::ring_progress() {
  if (progress_.empty()) return;
  for (Waiter* w : progress_) w->bell.ring();
  kick();
}

void Engine::kick() { ring(kick_.get()); }

void Engine::nudge(Nanos delay) {
  if (!nudged_.exchange(true, std::memory_order_acq_rel) || delay == 0) ring_at(nudge_.get(), now() + delay + 1);
}

void Engine::ring_park() { ring(park_bell_.get()); }

// ---- polling. Leader only, while mutex_ is not held.

/// Reads one link; returns whether it had data.
bool Engine::read_from(const ConnectionPtr& c) {
  class Arrivals final : public Inbox {
   public:
    Arrivals(Engine& engine, const ConnectionPtr& c) : engine_(engine), c_(c) {}
    BlockPtr allocate(std::size_t size) override { return engine_.pool_->allocate(size); }
    BlockPtr take_over(BlockPtr lent) override { return engine_.pool_->count(std::move(lent)); }
    void deliver(Incoming&& m) override {
      large = large || (!m.segments.empty() && m.segments.back()->size() >= kMuch);
      engine_.on_message(c_, std::move(m));
    }
    bool large = false;

   private:
    Engine& engine_;
    const ConnectionPtr& c_;
  };
  const std::uint64_t before = arrivals_;
  Arrivals arrivals(*this, c);
  const ReceiveState state = c->link->receive(arrivals, kBudget);
  take_in_answers(c);
  if (!widened_.empty()) {  // data that arrived right after a new lane
    for (const ConnectionPtr& other : std::exchange(widened_, {})) read_from(other);
  }
  if (state == ReceiveState::kBroken) {
    lost(c, c->link->error());
    return true;
  }
  if (state == ReceiveState::kToSend) flush(c);
  if (arrivals.large) widen(c);
  if (arrivals_ == before) return false;
  if (!c->awake) stay_awake(c);
  return true;
}

/// Polls the busy-polled links without a system call; returns whether one of them had data.
bool Engine::glance() {
  bool found = false;
  for (std::size_t i = 0; i < awake_.size(); ++i) {
    if (!awake_[i]->link->ready()) continue;
    const ConnectionPtr c = awake_[i];
    found = read_from(c) || found;
  }
  return found;
}

/// Marks a connection as closed. The leader drops its references to it.
void Engine::bury(Connection& c) {
  c.state = Connection::State::kDead;
  has_dead_.store(true, std::memory_order_release);
}

/// Returns the closed connections that the leader referenced. Destroy them while the mutex is not held, because this
/// unmaps shared memory.
std::vector<ConnectionPtr> Engine::forget_dead() {
  std::vector<ConnectionPtr> dead;
  if (!has_dead_.exchange(false, std::memory_order_acquire)) return dead;
  const auto dies = [&dead](const ConnectionPtr& c) {
    if (!c || c->state != Connection::State::kDead) return false;
    dead.push_back(c);
    return true;
  };
  if (dies(hot_)) hot_.reset();
  std::erase_if(awake_, dies);
  return dead;
}

/// Arms the wake-up of all busy-polled links. Returns false if one of them already has a message.
bool Engine::put_to_sleep() {
  std::erase_if(awake_, [](const ConnectionPtr& c) {
    const bool asleep = c->state == Connection::State::kDead || c->link->fall_asleep();
    if (asleep) c->awake = false;
    return asleep;
  });
  return awake_.empty();
}

/// Polls once while spinning. Most of these polls read only the links that were active last.
bool Engine::spin_once(std::uint32_t turn) {
  if (!awake_.empty() && ++glances_ % kGlances != 0) {
    const bool found = glance();
    if (found || !hot_ || hot_->awake) return found;
  }
  return hot_ && !hot_->awake && (turn < kHotTurns || turn % 4 != 0) ? read_from(hot_) : look(0);
}

/// Polls every link; returns whether anything happened.
bool Engine::look(int timeout_ms) {
  bool heard = glance();
  if (!heard && timeout_ms != 0 && !put_to_sleep()) heard = glance();
  epoll_event events[64];
  const int n = epoll_wait(inner_.get(), events, 64, heard ? 0 : timeout_ms);
  for (int i = 0; i < n; ++i) {
    const std::uint64_t token = events[i].data.u64;
    if (token == kKickToken) {
      drain(kick_.get());
      continue;
    }
    if (token == kNudgeToken) {
      drain(nudge_.get());
      nudged_.store(false, std::memory_order_release);
      Item item;
      item.kind = ItemKind::kEvent;
      item.event = EventKind::kNudge;
      std::lock_guard lock(mutex_);
      push(std::move(item));
      continue;
    }
    ConnectionPtr c;
    std::shared_ptr<Listener> listener;
    const bool lanes = token & kLanes;
    {
      std::lock_guard lock(mutex_);
      if (auto found = connections_.find(token & ~kLanes); found != connections_.end()) {
        c = found->second;
      } else if (auto l = listeners_.find(token); l != listeners_.end()) {
        listener = l->second;
      }
    }
    if (listener) accept_from(*listener);
    if (!c) continue;
    if (lanes) c->link->look_at_lanes();
    if (lanes || events[i].events & EPOLLOUT) flush(c);
    if (events[i].events & ~static_cast<std::uint32_t>(EPOLLOUT)) {
      if (read_from(c)) hot_ = c;
    }
  }
  return heard || n > 0;
}

/// Polls until something happens, spinning first if that pays. Returns false if nothing did before `until`, or if a
/// caller has taken leadership from the pool thread of this term.
bool Engine::poll(Spin& spin, Nanos until, bool may_block, Gate::Pass pass) {
  const Nanos start = now();
  const Nanos stop = std::min(until, start + spin.budget());
  for (std::uint32_t turn = 1;; ++turn) {
    const Nanos at = now();
    tick_if_due(at);
    if (at >= stop) break;
    if (at - gathering_since_.load(std::memory_order_relaxed) >= kGather) release_gathered();
    if (!gate_.enter(pass)) return false;
    const bool found = spin_once(turn);
    if (has_dead_.load(std::memory_order_relaxed)) forget_dead();
    const std::uint32_t patience = awake_.empty() ? Spin::kYieldEvery : Spin::kYieldEveryGlances;
    gate_.leave(pass);
    if (found) {
      spin.hit(now() - start);
      return true;
    }
    if (turn >= kHotTurns && turn % patience == 0 && !Spin::yield()) break;
  }
  if (gathering_since_.load(std::memory_order_relaxed) != kNever) release_gathered();
  if (!may_block) {
    if (!gate_.enter(pass)) return false;
    const bool found = look(0);
    if (has_dead_.load(std::memory_order_relaxed)) forget_dead();
    gate_.leave(pass);
    return found;
  }
  const bool found = look(milliseconds(until));
  if (has_dead_.load(std::memory_order_relaxed)) forget_dead();
  if (found) spin.slept(now() - start);
  return found;
}

// ---- callers

WaitEnd Engine::wait_for(For what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                         const std::function<bool()>& interrupted, std::uint64_t connection) {
  bool holding = false;
  int strangers = 0;
  if (gathering_since_.load(std::memory_order_relaxed) != kNever) release_gathered();
  std::vector<ConnectionPtr> dead;
  Lock lock(mutex_);
  WaitEnd end = WaitEnd::kDone;
  if (what == For::kProgress) {
    progress_.push_back(&w);
    ++progress_waiters_;
  }
  while (!done()) {
    const Nanos at = now();
    if (at >= deadline) {
      end = WaitEnd::kDeadline;
      break;
    }
    if (stopped_) {
      end = WaitEnd::kStopped;
      break;
    }
    const Nanos until = interrupted ? std::min(deadline, at + kSlice) : deadline;
    w.bell.reset();
    if (w.promoted) holding = true;
    w.promoted = false;
    if (!holding && strangers < kStrangersBeforeHandover && (!role_held_ || gate_.take())) {
      take_role();
      holding = true;
      if (connection != 0 && caller_spin_.budget() > 0) stay_awake_for(connection);
    }
    if (done()) break;
    if (holding) {
      // Completions of other calls: most often this thread's own reply is next, and it leaves soon to run them.
      const bool finished = !urgent_.empty();
      lock.unlock();
      const bool found = poll(caller_spin_, until, !finished);
      const bool stop = !found && interrupted && interrupted();
      lock.lock();
      if (stop) {
        end = WaitEnd::kInterrupted;
        break;
      }
      if (has_requests()) {
        ++strangers;
        if (strangers >= kStrangersBeforeHandover && !done() && (!idle_.empty() || parked_)) {
          holding = role_held_ = false;  // from now on the pool reads and runs the requests
          released_at_ = now();
          arm_timer(released_at_ + grace_);
        }
        wake_for_work();
      } else if (finished && !done()) {
        wake_for_work();
      }
    } else {
      auto me = sleepers_.insert(sleepers_.end(), &w);
      lock.unlock();
      w.bell.wait(until);
      const bool stop = !w.bell.rung() && interrupted && interrupted();
      lock.lock();
      sleepers_.erase(me);
      if (stop) {
        end = WaitEnd::kInterrupted;
        break;
      }
      strangers = 0;
    }
  }
  if (what == For::kProgress) {
    progress_.remove(&w);
    --progress_waiters_;
  }
  // A thread with some completions of a wait set waits again soon; if it does not, it dissolves the set.
  if (holding || std::exchange(w.promoted, false)) release_role(what == For::kOutcomes && end == WaitEnd::kDone);
  if (stopped_ && !role_held_) dead = forget_dead();  // no thread will poll again
  if (!urgent_.empty()) arm_timer(now() + kGrace);
  return end;
}

}  // namespace telegrad

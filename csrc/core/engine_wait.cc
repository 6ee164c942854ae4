// Who polls, and how: the role, looking at links, waiting callers. See engine.h for the idea.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/bells.h"
#include "core/engine.h"

namespace telegrad {
namespace {

constexpr Nanos kSlice = kSecond;            // a sleep that a signal may have to end is at most this long
constexpr std::size_t kMuch = 1 << 20;       // bytes of a tensor that may make lanes worth while
constexpr std::size_t kBudget = 4 << 20;     // bytes read from one link before the others have their turn
constexpr std::uint32_t kHotTurns = 16;      // looks at the last busy link alone, before the others are looked at too
constexpr std::uint32_t kGlances = 128;      // looks at links that are awake, before the others are looked at too
constexpr int kStrangersBeforeHandover = 2;  // requests a waiting caller reads before it lets the pool poll

int milliseconds(Nanos until) {
  if (until == kNever) return -1;
  const Nanos left = until - now();
  return left <= 0 ? 0 : static_cast<int>(std::min<Nanos>((left + kMillisecond - 1) / kMillisecond, 1'000'000'000));
}

}  // namespace

// ---- the role. All with the mutex held.

void Engine::set_outer(bool enabled) {
  if (enabled && !put_to_sleep()) kick();  // one of them has a message: the parked thread is to look
  if (in_outer_ == enabled) return;
  epoll_event event{.events = enabled ? static_cast<std::uint32_t>(EPOLLIN) : 0u, .data = {.u64 = kInnerToken}};
  epoll_ctl(outer_.get(), EPOLL_CTL_MOD, inner_.get(), &event);
  in_outer_ = enabled;
}

void Engine::take_role() {
  role_held_ = true;
  if (parked_) set_outer(false);
}

/// `to_user_code`: a pool thread goes to run something and will be back; everyone else may not be.
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

/// Nobody polls: see to it that somebody is woken when a link has something.
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

/// The holder of the role is about to look out for something from this link: it need not be woken for it.
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

/// Is there something that one more thread should take now? A thread that is at finished calls takes those that follow
/// as well, unless it is held up: while the program holds the interpreter's lock, more threads would only queue for it.
bool Engine::has_work() const { return has_requests() || has_urgent(); }

bool Engine::has_urgent() const {
  return !urgent_.empty() && (urgent_.front().kind != ItemKind::kOutcome || !finishes_calls());
}

/// Is a thread of the pool at finished calls, and not held up?
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

/// What was not urgent is now.
void Engine::hurry_lazy() {
  if (lazy_.empty()) return;
  std::move(lazy_.begin(), lazy_.end(), std::back_inserter(urgent_));
  lazy_.clear();
  has_lazy_.store(false, std::memory_order_relaxed);
  wake_for_work();
}

/// Some work waits and this thread will not do it.
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

/// Credit came, or bytes left.
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

// ---- polling. By the holder of the role, without the mutex.

/// Reads one link; true if it had anything.
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
  if (!widened_.empty()) {  // what came right behind a lane
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

/// A look at the links that are awake, which costs no system call; true if one of them had anything.
bool Engine::glance() {
  bool found = false;
  for (std::size_t i = 0; i < awake_.size(); ++i) {
    if (!awake_[i]->link->ready()) continue;
    const ConnectionPtr c = awake_[i];
    found = read_from(c) || found;
  }
  return found;
}

/// From now on it is no link of its own; who polls is told not to read it.
void Engine::bury(Connection& c) {
  c.state = Connection::State::kDead;
  has_dead_.store(true, std::memory_order_release);
}

/// Those that are dead, to be let go of without the mutex: with them goes the memory that they shared.
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

/// From now on links wake who sleeps in epoll. False: one of them has something already.
bool Engine::put_to_sleep() {
  std::erase_if(awake_, [](const ConnectionPtr& c) {
    const bool asleep = c->state == Connection::State::kDead || c->link->fall_asleep();
    if (asleep) c->awake = false;
    return asleep;
  });
  return awake_.empty();
}

/// One look of many: most are only at the links that were busy last.
bool Engine::spin_once(std::uint32_t turn) {
  if (!awake_.empty() && ++glances_ % kGlances != 0) {
    const bool found = glance();
    if (found || !hot_ || hot_->awake) return found;
  }
  return hot_ && !hot_->awake && (turn < kHotTurns || turn % 4 != 0) ? read_from(hot_) : look(0);
}

/// One look at every link; true if anything happened.
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

/// Looks until something happens, spinning first if that pays. False: nothing did before `until`, or a caller has taken
/// the role from the thread of the pool whose pass this is.
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
      // Finished calls of others: most often this thread's own reply is next, and it will be gone in a moment.
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
          holding = role_held_ = false;  // the pool reads and runs them itself from here on
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
  // Who has collected some outcomes comes back for more, and if not, says so.
  if (holding || std::exchange(w.promoted, false)) release_role(what == For::kOutcomes && end == WaitEnd::kDone);
  if (stopped_ && !role_held_) dead = forget_dead();  // nobody will poll any more
  if (!urgent_.empty()) arm_timer(now() + kGrace);
  return end;
}

}  // namespace telegrad

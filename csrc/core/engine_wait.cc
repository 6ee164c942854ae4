// Leadership, polling of links, and waiting callers. See engine.h.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "core/engine.h"
#include "core/wakeup_fd.h"

namespace telegrad {
namespace {

constexpr Nanos kSignalCheckInterval = kSecond;  // longest sleep that checks for signals afterwards
constexpr std::size_t kLargeTensor = 1 << 20;    // bytes of a tensor for which lanes may pay
constexpr std::size_t kReadBudget = 4 << 20;     // bytes read from one link before the others are read
constexpr std::uint32_t kLastActivePolls = 16;   // polls of the last active link alone before all links are polled
constexpr std::uint32_t kMemoryPolls = 128;      // polls of busy-polled links alone before all links are polled
constexpr int kRequestsBeforeHandoff = 2;        // requests that a waiting caller reads before the pool polls

int milliseconds(Nanos until) {
  if (until == kNever) return -1;
  const Nanos left = until - now();
  return left <= 0 ? 0 : static_cast<int>(std::min<Nanos>((left + kMillisecond - 1) / kMillisecond, 1'000'000'000));
}

}  // namespace

// ---- leadership. All require mutex_.

void Engine::set_links_watched(bool enabled) {
  if (enabled && !arm_wakeups()) interrupt_poll();  // a link has a message: the parked thread must poll
  if (links_watched_ == enabled) return;
  epoll_event event{.events = enabled ? static_cast<std::uint32_t>(EPOLLIN) : 0u, .data = {.u64 = kLinksToken}};
  epoll_ctl(park_epoll_.get(), EPOLL_CTL_MOD, links_epoll_.get(), &event);
  links_watched_ = enabled;
}

void Engine::become_leader() {
  has_leader_ = true;
  if (parked_) set_links_watched(false);
}

/// Ends leadership. `to_user_code`: a pool thread runs an item and will return; any other thread may not.
void Engine::resign(bool to_user_code) {
  has_leader_ = false;
  handoff_.end_term();
  released_at_ = now();
  if (!to_user_code && !sleeping_callers_.empty()) {
    Waiter* next = sleeping_callers_.front();
    has_leader_ = true;
    next->made_leader = true;
    next->parker.notify();
  } else if (!to_user_code && calls_.waiting_async() > 0) {
    watch_links();
  } else {
    arm_timer(released_at_ + handoff_delay_);
  }
}

/// Ensures that a thread is woken when a link has data while there is no leader.
void Engine::watch_links() {
  if (parked_) {
    set_links_watched(true);
  } else if (!sleeping_callers_.empty()) {
    Waiter* next = sleeping_callers_.front();
    has_leader_ = true;
    next->made_leader = true;
    next->parker.notify();
  } else if (!idle_.empty()) {
    idle_.back()->parker.notify();
  }
}

/// Busy polls the connection on which the leader is about to wait, so that the peer need not wake it.
void Engine::enable_busy_poll_for(std::uint64_t connection) {
  ConnectionPtr c = last_active_ && last_active_->id == connection ? last_active_ : nullptr;
  if (auto found = connections_.find(connection); !c && found != connections_.end()) c = found->second;
  if (c && !c->busy_polled) enable_busy_poll(c);
}

void Engine::enable_busy_poll(const ConnectionPtr& c) {
  if (!c->link->enable_busy_poll()) return;
  c->busy_polled = true;
  busy_polled_.push_back(c);
}

/// Returns whether one more thread should take an item now. A thread that runs completions also takes the next ones,
/// unless it is blocked: while the program holds the GIL, more threads would only queue for it.
bool Engine::has_work() const { return has_requests() || has_urgent(); }

bool Engine::has_urgent() const {
  return !urgent_.empty() && (urgent_.front().kind != WorkKind::kCompletion || !is_running_completions());
}

/// Returns whether a thread of the pool is running completions and is not blocked.
bool Engine::is_running_completions() const {
  return running_completions_ > 0 && now() - completion_taken_at_ < kCompletionDelay;
}

bool Engine::has_requests() const { return !nested_.empty() || (!top_.empty() && running_top_ < settings_.handlers); }

void Engine::push(WorkItem&& item) {
  if (item.since == 0) item.since = now();
  std::deque<WorkItem>& queue = item.kind != WorkKind::kRequest       ? urgent_
                                : item.message.header.flags & kNested ? nested_
                                                                      : top_;
  queue.push_back(std::move(item));
  if (!has_leader_) arm_timer(now() + kHandoffDelay);
}

/// Queues the deferred completions for the pool.
void Engine::flush_deferred() {
  if (deferred_.empty()) return;
  std::move(deferred_.begin(), deferred_.end(), std::back_inserter(urgent_));
  deferred_.clear();
  has_deferred_.store(false, std::memory_order_relaxed);
  wake_for_work();
}

/// Wakes a thread of the pool if there is work that the calling thread will not do.
void Engine::wake_for_work() {
  if (!has_work()) return;
  if (!idle_.empty()) {
    idle_.back()->parker.notify();
  } else if (parked_) {
    notify_parked();
  } else {
    arm_timer(now() + kHandoffDelay);
  }
}

/// Wakes the threads that wait for credit or for bytes to be sent.
void Engine::notify_progress() {
  if (progress_.empty()) return;
  for (Waiter* w : progress_) w->parker.notify();
  interrupt_poll();
}

void Engine::interrupt_poll() { notify_fd(interrupt_fd_.get()); }

void Engine::request_callback(Nanos delay) {
  if (!callback_requested_.exchange(true, std::memory_order_acq_rel) || delay == 0)
    arm_timerfd(callback_fd_.get(), now() + delay + 1);
}

void Engine::notify_parked() { notify_fd(park_fd_.get()); }

// ---- polling. Leader only, while mutex_ is not held.

/// Reads one link; returns whether it had data.
bool Engine::read_from(const ConnectionPtr& c) {
  class Arrivals final : public Inbox {
   public:
    Arrivals(Engine& engine, const ConnectionPtr& c) : engine_(engine), c_(c) {}
    BlockPtr allocate(std::size_t size) override { return engine_.pool_->allocate(size); }
    BlockPtr adopt(BlockPtr leased) override { return engine_.pool_->adopt(std::move(leased)); }
    void deliver(Incoming&& m) override {
      large = large || (!m.segments.empty() && m.segments.back()->size() >= kLargeTensor);
      engine_.on_message(c_, std::move(m));
    }
    bool large = false;

   private:
    Engine& engine_;
    const ConnectionPtr& c_;
  };
  const std::uint64_t before = arrivals_;
  Arrivals arrivals(*this, c);
  const ReceiveState state = c->link->receive(arrivals, kReadBudget);
  process_replies(c);
  if (!new_lane_links_.empty()) {  // data that arrived right after a new lane
    for (const ConnectionPtr& other : std::exchange(new_lane_links_, {})) read_from(other);
  }
  if (state == ReceiveState::kBroken) {
    close_connection(c, c->link->error());
    return true;
  }
  if (state == ReceiveState::kToSend) flush(c);
  if (arrivals.large) open_lanes(c);
  if (arrivals_ == before) return false;
  if (!c->busy_polled) enable_busy_poll(c);
  return true;
}

/// Polls the busy-polled links without a system call; returns whether one of them had data.
bool Engine::poll_memory() {
  bool found = false;
  for (std::size_t i = 0; i < busy_polled_.size(); ++i) {
    if (!busy_polled_[i]->link->ready()) continue;
    const ConnectionPtr c = busy_polled_[i];
    found = read_from(c) || found;
  }
  return found;
}

/// Marks a connection as closed. The leader drops its references to it.
void Engine::mark_closed(Connection& c) {
  c.state = Connection::State::kClosed;
  has_closed_.store(true, std::memory_order_release);
}

/// Returns the closed connections that the leader referenced. Destroy them while the mutex is not held, because this
/// unmaps shared memory.
std::vector<ConnectionPtr> Engine::reap_closed() {
  std::vector<ConnectionPtr> closed;
  if (!has_closed_.exchange(false, std::memory_order_acquire)) return closed;
  const auto dies = [&closed](const ConnectionPtr& c) {
    if (!c || c->state != Connection::State::kClosed) return false;
    closed.push_back(c);
    return true;
  };
  if (dies(last_active_)) last_active_.reset();
  std::erase_if(busy_polled_, dies);
  return closed;
}

/// Arms the wake-up of all busy-polled links. Returns false if one of them already has a message.
bool Engine::arm_wakeups() {
  std::erase_if(busy_polled_, [](const ConnectionPtr& c) {
    const bool asleep = c->state == Connection::State::kClosed || c->link->arm_wakeup();
    if (asleep) c->busy_polled = false;
    return asleep;
  });
  return busy_polled_.empty();
}

/// Polls once while spinning. Most of these polls read only the links that were active last.
bool Engine::poll_once(std::uint32_t turn) {
  if (!busy_polled_.empty() && ++memory_polls_ % kMemoryPolls != 0) {
    const bool found = poll_memory();
    if (found || !last_active_ || last_active_->busy_polled) return found;
  }
  return last_active_ && !last_active_->busy_polled && (turn < kLastActivePolls || turn % 4 != 0)
             ? read_from(last_active_)
             : poll_fds(0);
}

/// Polls every link; returns whether anything happened.
bool Engine::poll_fds(int timeout_ms) {
  bool heard = poll_memory();
  if (!heard && timeout_ms != 0 && !arm_wakeups()) heard = poll_memory();
  epoll_event events[64];
  const int n = epoll_wait(links_epoll_.get(), events, 64, heard ? 0 : timeout_ms);
  for (int i = 0; i < n; ++i) {
    const std::uint64_t token = events[i].data.u64;
    if (token == kInterruptToken) {
      drain_fd(interrupt_fd_.get());
      continue;
    }
    if (token == kCallbackToken) {
      drain_fd(callback_fd_.get());
      callback_requested_.store(false, std::memory_order_release);
      WorkItem item;
      item.kind = WorkKind::kEvent;
      item.event = EventKind::kCallback;
      std::lock_guard lock(mutex_);
      push(std::move(item));
      continue;
    }
    ConnectionPtr c;
    std::shared_ptr<Listener> listener;
    const bool lanes = token & kLanesBit;
    {
      std::lock_guard lock(mutex_);
      if (auto found = connections_.find(token & ~kLanesBit); found != connections_.end()) {
        c = found->second;
      } else if (auto l = listeners_.find(token); l != listeners_.end()) {
        listener = l->second;
      }
    }
    if (listener) accept_from(*listener);
    if (!c) continue;
    if (lanes) c->link->poll_lanes();
    if (lanes || events[i].events & EPOLLOUT) flush(c);
    if (events[i].events & ~static_cast<std::uint32_t>(EPOLLOUT)) {
      if (read_from(c)) last_active_ = c;
    }
  }
  return heard || n > 0;
}

/// Polls until something happens, spinning first if that pays. Returns false if nothing did before `until`, or if a
/// caller has taken leadership from the pool thread of this term.
bool Engine::poll(Spin& spin, Nanos until, bool may_block, LeaderHandoff::Term term) {
  const Nanos start = now();
  const Nanos stop = std::min(until, start + spin.budget());
  for (std::uint32_t turn = 1;; ++turn) {
    const Nanos at = now();
    on_timer_if_due(at);
    if (at >= stop) break;
    if (at - coalescing_since_.load(std::memory_order_relaxed) >= kCoalesceDelay) flush_coalesced();
    if (!handoff_.begin_poll(term)) return false;
    const bool found = poll_once(turn);
    if (has_closed_.load(std::memory_order_relaxed)) reap_closed();
    const std::uint32_t patience = busy_polled_.empty() ? Spin::kYieldEvery : Spin::kYieldEveryMemoryPolls;
    handoff_.end_poll(term);
    if (found) {
      spin.hit(now() - start);
      return true;
    }
    if (turn >= kLastActivePolls && turn % patience == 0 && !Spin::yield()) break;
  }
  if (coalescing_since_.load(std::memory_order_relaxed) != kNever) flush_coalesced();
  if (!may_block) {
    if (!handoff_.begin_poll(term)) return false;
    const bool found = poll_fds(0);
    if (has_closed_.load(std::memory_order_relaxed)) reap_closed();
    handoff_.end_poll(term);
    return found;
  }
  const bool found = poll_fds(milliseconds(until));
  if (has_closed_.load(std::memory_order_relaxed)) reap_closed();
  if (found) spin.slept(now() - start);
  return found;
}

// ---- callers

WaitEnd Engine::wait_for(For what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                         const std::function<bool()>& interrupted, std::uint64_t connection) {
  bool leading = false;
  int requests_read = 0;
  if (coalescing_since_.load(std::memory_order_relaxed) != kNever) flush_coalesced();
  std::vector<ConnectionPtr> closed;
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
    const Nanos until = interrupted ? std::min(deadline, at + kSignalCheckInterval) : deadline;
    w.parker.reset();
    if (w.made_leader) leading = true;
    w.made_leader = false;
    if (!leading && requests_read < kRequestsBeforeHandoff && (!has_leader_ || handoff_.adopt())) {
      become_leader();
      leading = true;
      if (connection != 0 && caller_spin_.budget() > 0) enable_busy_poll_for(connection);
    }
    if (done()) break;
    if (leading) {
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
        ++requests_read;
        if (requests_read >= kRequestsBeforeHandoff && !done() && (!idle_.empty() || parked_)) {
          leading = has_leader_ = false;  // from now on the pool reads and runs the requests
          released_at_ = now();
          arm_timer(released_at_ + handoff_delay_);
        }
        wake_for_work();
      } else if (finished && !done()) {
        wake_for_work();
      }
    } else {
      auto me = sleeping_callers_.insert(sleeping_callers_.end(), &w);
      lock.unlock();
      w.parker.wait(until);
      const bool stop = !w.parker.is_notified() && interrupted && interrupted();
      lock.lock();
      sleeping_callers_.erase(me);
      if (stop) {
        end = WaitEnd::kInterrupted;
        break;
      }
      requests_read = 0;
    }
  }
  if (what == For::kProgress) {
    progress_.remove(&w);
    --progress_waiters_;
  }
  // A thread with some completions of a wait set waits again soon; if it does not, it dissolves the set.
  if (leading || std::exchange(w.made_leader, false)) resign(what == For::kCompletions && end == WaitEnd::kDone);
  if (stopped_ && !has_leader_) closed = reap_closed();  // no thread will poll again
  if (!urgent_.empty()) arm_timer(now() + kHandoffDelay);
  return end;
}

}  // namespace telegrad

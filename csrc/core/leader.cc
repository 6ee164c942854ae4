#include "core/leader.h"

#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/engine_parts.h"
#include "core/wakeup_fd.h"

namespace telegrad {

namespace {

void add(const UniqueFd& epoll, int fd, std::uint64_t token, std::uint32_t events) {
  epoll_event event{.events = events, .data = {.u64 = token}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot add a descriptor to epoll");
  }
}

UniqueFd make_epoll() { return check_fd(epoll_create1(EPOLL_CLOEXEC), "cannot create an epoll descriptor"); }

/// Returns how many processors this process may use.
int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Leader::Leader(EngineParts& parts)
    : parts_(parts),
      links_epoll_(make_epoll()),
      park_epoll_(make_epoll()),
      interrupt_fd_(make_eventfd()),
      park_fd_(make_eventfd()),
      callback_fd_(make_timerfd(TFD_NONBLOCK)),
      caller_spin_(parts.settings.spin),
      spin_limit_(static_cast<std::size_t>(std::max(processors() / 2, 1))) {
  add(links_epoll_, interrupt_fd_.get(), kInterruptToken, EPOLLIN);
  add(links_epoll_, callback_fd_.get(), kCallbackToken, EPOLLIN);
  add(park_epoll_, links_epoll_.get(), kLinksToken, 0);
  add(park_epoll_, park_fd_.get(), kParkToken, EPOLLIN);
}

void Leader::add_fd(int fd, std::uint64_t token) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = token}};
  if (epoll_ctl(links_epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) watched_.fetch_add(1, std::memory_order_relaxed);
}

void Leader::remove_fd(int fd) {
  if (epoll_ctl(links_epoll_.get(), EPOLL_CTL_DEL, fd, nullptr) == 0) watched_.fetch_sub(1, std::memory_order_relaxed);
}

void Leader::set_writable(int fd, std::uint64_t token, bool on) {
  epoll_event event{.events = on ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN},
                    .data = {.u64 = token}};
  epoll_ctl(links_epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Leader::abandon_in_child() {
  for (UniqueFd* fd : {&links_epoll_, &park_epoll_, &interrupt_fd_, &park_fd_, &callback_fd_}) ::close(fd->release());
  struct Abandoned {  // never destroyed: their links belong to the parent
    ConnectionPtr last_active;
    std::vector<ConnectionPtr> busy_polled;
  };
  new Abandoned{std::move(last_active_), std::move(busy_polled_)};
  last_active_.reset();
  busy_polled_.clear();
  sleeping_callers_.clear();
  progress_.clear();
  parked_ = nullptr;
  has_leader_ = false;
  handoff_.end_term();
}

// ---- leadership

void Leader::set_links_watched(bool enabled) {
  if (enabled && !arm_wakeups()) interrupt_poll();  // a link has a message: the parked thread must poll
  if (links_watched_ == enabled) return;
  epoll_event event{.events = enabled ? static_cast<std::uint32_t>(EPOLLIN) : 0u, .data = {.u64 = kLinksToken}};
  epoll_ctl(park_epoll_.get(), EPOLL_CTL_MOD, links_epoll_.get(), &event);
  links_watched_ = enabled;
}

void Leader::become_leader() {
  has_leader_ = true;
  unread_ = false;
  if (parked_) set_links_watched(false);
}

/// Ends leadership. `to_user_code`: a pool thread runs an item and will return; any other thread may not.
void Leader::resign(bool to_user_code) {
  has_leader_ = false;
  handoff_.end_term();
  released_at_ = now();
  if (!to_user_code && !sleeping_callers_.empty()) {
    promote_sleeping_caller();
  } else if (!to_user_code && parts_.calls.waiting_async() > 0) {
    watch_links();
  } else {
    parts_.timer.arm(released_at_ + handoff_delay_);
  }
}

void Leader::promote_sleeping_caller() {
  Waiter* next = sleeping_callers_.front();
  has_leader_ = true;
  next->made_leader = true;
  next->parker.notify();
}

void Leader::watch_links() {
  unread_ = false;
  if (parked_) {
    set_links_watched(true);
  } else if (!sleeping_callers_.empty()) {
    promote_sleeping_caller();
  } else if (parts_.queue.has_idle_thread()) {
    parts_.queue.notify_idle_thread();
  } else {
    unread_ = true;
    parts_.timer.arm(now() + kUnreadTimeout);
  }
}

void Leader::on_timer(Nanos at) {
  if (has_leader_) {
    handoff_delay_ = kMaxHandoffDelay;
    return;
  }
  if (parked_ && links_watched_) return;
  if (at - released_at_ >= handoff_delay_) {
    handoff_delay_ = kHandoffDelay;
    watch_links();
  } else {
    handoff_delay_ = kMaxHandoffDelay;
    parts_.timer.arm(released_at_ + handoff_delay_);
  }
}

// ---- wake-ups

void Leader::notify_sleeping_callers() {
  for (Waiter* w : sleeping_callers_) w->parker.notify();
}

void Leader::notify_progress() {
  if (progress_.empty()) return;
  for (Waiter* w : progress_) w->parker.notify();
  interrupt_poll();
}

void Leader::interrupt_poll() { notify_fd(interrupt_fd_.get()); }

void Leader::request_callback(Nanos delay) {
  if (!callback_requested_.exchange(true, std::memory_order_acq_rel) || delay == 0)
    arm_timerfd(callback_fd_.get(), now() + delay + 1);
}

void Leader::notify_parked() { notify_fd(park_fd_.get()); }

// ---- waiting

WaitEnd Leader::wait_for_progress(Waiter& w, const std::function<bool()>& done, Nanos deadline,
                                  const std::function<bool()>& interrupted) {
  Lock lock(parts_.mutex);
  return wait_for(lock, WaitFor::kProgress, w, done, deadline, interrupted);
}

WaitEnd Leader::wait_for(Lock& lock, WaitFor what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                         const std::function<bool()>& interrupted, std::uint64_t connection) {
  if (parts_.sender.has_coalesced()) {
    Unlock unlocked(lock);
    parts_.sender.flush_coalesced();
  }
  if (what == WaitFor::kProgress) {
    progress_.push_back(&w);
    ++progress_waiters_;
  }
  Wait wait{.waiter = w, .done = done, .interrupted = interrupted, .connection = connection};
  const WaitEnd end = wait_until(lock, wait, deadline);
  if (what == WaitFor::kProgress) {
    progress_.remove(&w);
    --progress_waiters_;
  }
  // A thread with some completions of a wait set waits again soon; if it does not, it dissolves the set.
  if (wait.leading || std::exchange(w.made_leader, false))
    resign(what == WaitFor::kCompletions && end == WaitEnd::kDone);
  if (parts_.queue.has_urgent_items()) parts_.timer.arm(now() + kHandoffDelay);
  if (parts_.stopped && !has_leader_) {  // no thread will poll again
    std::vector<ConnectionPtr> closed = reap_closed();
    Unlock unlocked(lock);
    closed.clear();
  }
  return end;
}

inline WaitEnd Leader::wait_until(Lock& lock, Wait& wait, Nanos deadline) {
  while (!wait.done()) {
    const Nanos at = now();
    if (at >= deadline) return WaitEnd::kDeadline;
    if (parts_.stopped) return WaitEnd::kStopped;
    const Nanos until = wait.interrupted ? std::min(deadline, at + kSignalCheckInterval) : deadline;
    wait.waiter.parker.reset();
    try_to_lead(wait);
    const bool goes_on = wait.leading ? lead_once(lock, wait, until) : sleep_once(lock, wait, until);
    if (!goes_on) return WaitEnd::kInterrupted;
  }
  return WaitEnd::kDone;
}

/// Makes the waiting thread the leader, if there is none or it is to hand over.
inline void Leader::try_to_lead(Wait& wait) {
  if (std::exchange(wait.waiter.made_leader, false)) wait.leading = true;
  if (wait.leading || wait.requests_read >= kRequestsBeforeHandoff || (has_leader_ && !handoff_.take_over())) return;
  become_leader();
  wait.leading = true;
  if (wait.connection != 0 && caller_spin_.budget() > 0) enable_busy_poll_for(wait.connection);
}

/// Polls once as the leader. Returns false if the wait is interrupted.
inline bool Leader::lead_once(Lock& lock, Wait& wait, Nanos until) {
  // Completions of other calls: most often this thread's own reply is next, and it leaves soon to run them.
  const bool finished = parts_.queue.has_urgent_items();
  bool found;
  {
    Unlock unlocked(lock);
    found = poll(caller_spin_, until, !finished);
  }
  if (!found && wait.interrupted) {
    wait.leading = false;  // `interrupted` waits for the GIL, which user code may hold for long
    resign(false);
    if (finished || parts_.queue.has_requests()) parts_.queue.wake_for_work();
    return !is_interrupted(lock, wait);
  }
  if (parts_.queue.has_requests()) {
    ++wait.requests_read;
    const bool hands_over =
        wait.requests_read >= kRequestsBeforeHandoff && !wait.done() && (parts_.queue.has_idle_thread() || parked_);
    if (hands_over) {
      wait.leading = has_leader_ = false;  // from now on the pool reads and runs the requests
      released_at_ = now();
      parts_.timer.arm(released_at_ + handoff_delay_);
    }
    parts_.queue.wake_for_work();
  } else if (finished && !wait.done()) {
    parts_.queue.wake_for_work();
  }
  return true;
}

/// Sleeps until another thread wakes this one, at most `until`. Returns false if the wait is interrupted.
bool Leader::sleep_once(Lock& lock, Wait& wait, Nanos until) {
  auto me = sleeping_callers_.insert(sleeping_callers_.end(), &wait.waiter);
  {
    Unlock unlocked(lock);
    wait.waiter.parker.wait(until);
  }
  sleeping_callers_.erase(me);  // before `interrupted`, which may wait for the GIL: it cannot lead meanwhile
  if (wait.interrupted && !wait.waiter.parker.is_notified() && is_interrupted(lock, wait)) return false;
  wait.requests_read = 0;
  return true;
}

/// Asks the caller whether the wait is to end, without the mutex.
bool Leader::is_interrupted(Lock& lock, const Wait& wait) {
  Unlock unlocked(lock);
  return wait.interrupted();
}

bool Leader::next(PoolThread& self, WorkItem& out) {
  std::vector<ConnectionPtr> closed;
  Lock lock(parts_.mutex);
  parts_.queue.enter(self);
  bool leading = false;
  LeaderHandoff::Term term = LeaderHandoff::kCallerTerm;
  Spin no_spin(0);
  while (true) {
    if (parts_.stopped && !parts_.queue.has_urgent()) {
      if (leading) resign(false);
      if (!has_leader_) closed = reap_closed();  // no thread will poll again
      parts_.queue.leave(self);
      return false;
    }
    if (parts_.queue.pop(self, out)) {
      if (leading) resign(true);
      break;
    }
    if (leading || !has_leader_) {
      if (!leading) {
        become_leader();
        term = handoff_.begin_term();
      }
      Spin& spin = parts_.queue.running() < spin_limit_ ? self.spin : no_spin;
      lock.unlock();
      const bool found = poll(spin, kNever, false, term);
      lock.lock();
      leading = handoff_.is_current(term);
      if (leading && handoff_.is_wanted()) {
        leading = false;
        resign(false);
      }
      if (found || parts_.queue.has_work() || parts_.stopped) continue;
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
    if (!parts_.queue.sleep(lock, self)) {
      parts_.queue.leave(self);
      out.kind = WorkKind::kExitThread;
      return true;
    }
  }
  parts_.sender.begin_item(lock, out);
  return true;
}

/// Sleeps in epoll until there is work for this thread, or until a link has data while there is no leader.
void Leader::park(Lock& lock, PoolThread& self) {
  parked_ = &self;
  if (parts_.queue.is_running_completions() &&
      !has_leader_) {          // the thread that runs completions polls next, this one only after a while
    set_links_watched(false);  // `on_timer` arms the wake-up of the links when it enables `links_epoll_` again
    released_at_ = now();
    parts_.timer.arm(released_at_ + handoff_delay_);
  } else {
    set_links_watched(!has_leader_);
  }
  epoll_event events[2];
  int n;
  {
    Unlock unlocked(lock);
    const Nanos start = now();
    n = epoll_wait(park_epoll_.get(), events, 2, -1);
    if (n > 0) self.spin.slept(now() - start);
  }
  parked_ = nullptr;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kParkToken) drain_fd(park_fd_.get());
  }
}

// ---- closed connections

void Leader::mark_closed(Connection& c) {
  c.state = Connection::State::kClosed;
  has_closed_.store(true, std::memory_order_release);
}

std::vector<ConnectionPtr> Leader::reap_closed() {
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

}  // namespace telegrad

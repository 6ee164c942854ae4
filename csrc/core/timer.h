// The timer of an engine: one time at which something is due. The leader checks it between two polls; the timer thread
// sleeps until it is due, for engines without a leader.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/thread_safety.h"
#include "base/unique_fd.h"
#include "core/tuning.h"
#include "core/wakeup_fd.h"

namespace telegrad {

class Timer {
 public:
  /// Throws std::system_error.
  Timer();

  /// Starts the thread, which calls `on_timer` when the timer is due. Once.
  void start(std::mutex& mutex, std::function<void(Lock&)> on_timer);
  /// Ends the thread. Blocks until it has ended.
  void stop(std::mutex& mutex) EXCLUDES(engine_mutex);

  /// Makes something due at `at`, if nothing is due earlier.
  void arm(Nanos at) REQUIRES(engine_mutex) {
    if (at >= at_.load(std::memory_order_relaxed)) return;
    at_.store(at, std::memory_order_relaxed);
    arm_timerfd(fd_.get(), at + kTimerSlack);
  }
  /// Makes nothing due. The caller arms the timer again for everything that is left.
  void clear() REQUIRES(engine_mutex) { at_ = kNever; }
  /// Returns whether something is due. Any thread, without the mutex.
  bool is_due(Nanos at) const { return at >= at_.load(std::memory_order_relaxed); }
  /// Runs the timer. Any thread.
  void run(std::mutex& mutex) EXCLUDES(engine_mutex);

  /// Leaks the thread object in a forked child, which has no timer thread.
  void abandon_in_child() REQUIRES(engine_mutex);

 private:
  void loop(std::mutex& mutex);

  UniqueFd fd_;
  std::atomic<Nanos> at_ = kNever;  // written with the mutex held
  bool stopped_ GUARDED_BY(engine_mutex) = false;
  std::function<void(Lock&)> on_timer_;  // constant once started
  std::thread thread_;
};

}  // namespace telegrad

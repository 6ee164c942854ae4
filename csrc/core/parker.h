// Wake-up of one thread: other threads notify it, and its owner waits. A notification before the wait is not lost.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/clock.h"

namespace telegrad {

class Parker {
 public:
  /// Notifies the owner. Never blocks. Any thread.
  void notify() {
    if (state_.exchange(kNotified, std::memory_order_acq_rel) == kParked) {
      syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }

  bool is_notified() const { return state_.load(std::memory_order_acquire) == kNotified; }

  /// Discards earlier notifications. Owner only.
  void reset() { state_.store(kEmpty, std::memory_order_release); }

  /// Sleeps until notified, until `deadline`, or until a signal arrives. Owner only.
  void wait(Nanos deadline) {
    std::uint32_t empty = kEmpty;
    if (!state_.compare_exchange_strong(empty, kParked, std::memory_order_acq_rel)) return;
    if (deadline == kNever) {
      syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kParked, nullptr, nullptr, 0);
    } else {
      const timespec at{.tv_sec = deadline / kSecond, .tv_nsec = deadline % kSecond};  // absolute, monotonic
      syscall(SYS_futex, &state_, FUTEX_WAIT_BITSET_PRIVATE, kParked, &at, nullptr, FUTEX_BITSET_MATCH_ANY);
    }
    std::uint32_t parked = kParked;
    state_.compare_exchange_strong(parked, kEmpty, std::memory_order_acq_rel);
  }

 private:
  static constexpr std::uint32_t kEmpty = 0;
  static constexpr std::uint32_t kParked = 1;
  static constexpr std::uint32_t kNotified = 2;
  std::atomic<std::uint32_t> state_ = kEmpty;
};

}  // namespace telegrad

// Wake-up of one thread: other threads notify it, and its owner waits. A notification before the wait is not lost.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "core/clock.h"

namespace telegrad {

class Bell {
 public:
  /// Notifies the owner. Never blocks. Any thread.
  void ring() {
    if (state_.exchange(kRung, std::memory_order_acq_rel) == kAsleep) {
      syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }

  bool rung() const { return state_.load(std::memory_order_acquire) == kRung; }

  /// Discards earlier notifications. Owner only.
  void reset() { state_.store(kQuiet, std::memory_order_release); }

  /// Sleeps until notified, until `deadline`, or until a signal arrives. Owner only.
  void wait(Nanos deadline) {
    std::uint32_t quiet = kQuiet;
    if (!state_.compare_exchange_strong(quiet, kAsleep, std::memory_order_acq_rel)) return;
    if (deadline == kNever) {
      syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kAsleep, nullptr, nullptr, 0);
    } else {
      const timespec at{.tv_sec = deadline / kSecond, .tv_nsec = deadline % kSecond};  // absolute, monotonic
      syscall(SYS_futex, &state_, FUTEX_WAIT_BITSET_PRIVATE, kAsleep, &at, nullptr, FUTEX_BITSET_MATCH_ANY);
    }
    std::uint32_t asleep = kAsleep;
    state_.compare_exchange_strong(asleep, kQuiet, std::memory_order_acq_rel);
  }

 private:
  static constexpr std::uint32_t kQuiet = 0;
  static constexpr std::uint32_t kAsleep = 1;
  static constexpr std::uint32_t kRung = 2;
  std::atomic<std::uint32_t> state_ = kQuiet;
};

}  // namespace telegrad

// Adaptive spinning before a thread sleeps.
//
// A wake-up through the kernel costs 60 us or more, so a thread should poll for an event that arrives soon. For
// late events, polling only occupies the processor that its peer needs. So each waiting place has a Spin. It spins
// for as long as events have lately taken, up to a multiple of its budget. It stops spinning after a few misses, and
// starts again when an event arrives so soon after falling asleep that spinning would have caught it. Each spin ends at
// once if other threads need the processor.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "core/tuning.h"

namespace telegrad {

class Spin {
 public:
  explicit Spin(Nanos budget) : budget_(budget) {}

  /// Returns how long to spin now; 0: sleep at once.
  Nanos budget() const { return misses_ < kMaxMissedSpins ? span_ : 0; }

  /// Records an event that arrived while spinning, `waited` after the wait began.
  void hit(Nanos waited) {
    misses_ = 0;
    span_ = std::max({budget_, 2 * waited, span_ - span_ / 8});
    span_ = std::min(span_, kMaxSpinStretch * budget_);
  }

  /// Records an event that ended a sleep, `waited` after the wait began. If a longer spin would have caught it, the
  /// next spin is longer. Otherwise two ends that each sleep just before the other wakes would do so forever.
  void slept(Nanos waited) {
    if (waited < kMaxSpinStretch * budget_) {
      misses_ = 0;
      span_ = std::max(budget_, std::min(waited + waited / 2, kMaxSpinStretch * budget_));
    } else {
      span_ = budget_;
      if (misses_ < kMaxMissedSpins) ++misses_;
    }
  }

  /// Yields the processor; to be called periodically while spinning. Returns false if other threads need the processor
  /// so much that spinning should end.
  static bool yield() {
    const Nanos before = now();
    sched_yield();
    return now() - before < kCrowdedYield;
  }

 private:
  Nanos budget_;
  Nanos span_ = budget_;
  int misses_ = 0;
};

}  // namespace telegrad

// How long to spin before sleeping: only where it pays.
//
// A wake-up through the kernel costs 60 us or more, so a thread whose event comes soon does better to look for it
// awake. A thread whose events come late only burns the processor that its peer needs. So each place that waits keeps a
// Spin: it spins as long as events have lately taken to come, up to some multiple of its budget; stops after a few
// misses; starts again when an event came so soon after falling asleep that spinning would have caught it; and ends
// each spin at once where others want the processor.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "core/clock.h"

namespace telegrad {

class Spin {
 public:
  explicit Spin(Nanos budget) : budget_(budget) {}

  /// How long to spin now; 0: sleep at once.
  Nanos budget() const { return misses_ < kPatience ? span_ : 0; }

  /// The event came `waited` after the wait began, while spinning.
  void hit(Nanos waited) {
    misses_ = 0;
    span_ = std::max({budget_, 2 * waited, span_ - span_ / 8});
    span_ = std::min(span_, kStretch * budget_);
  }

  /// The event came `waited` after the wait began, out of sleep. If more patience would have met it, the next wait has
  /// more: two ends that each sleep just before the other wakes would go on so for ever.
  void slept(Nanos waited) {
    if (waited < kStretch * budget_) {
      misses_ = 0;
      span_ = std::max(budget_, std::min(waited + waited / 2, kStretch * budget_));
    } else {
      span_ = budget_;
      if (misses_ < kPatience) ++misses_;
    }
  }

  /// Call now and then while spinning: lets others run. False when the processor is wanted by others so much that
  /// spinning should end.
  static bool yield() {
    const Nanos before = now();
    sched_yield();
    return now() - before < kCrowded;
  }

  /// Looks between two offers of the processor to whoever else wants it.
  static constexpr std::uint32_t kYieldEvery = 8;
  /// The same where a look is no more than a glance at memory.
  static constexpr std::uint32_t kYieldEveryGlances = 64;

 private:
  static constexpr int kPatience = 3;
  static constexpr int kStretch = 20;
  static constexpr Nanos kCrowded = 200 * kMicrosecond;
  Nanos budget_;
  Nanos span_ = budget_;
  int misses_ = 0;
};

}  // namespace telegrad

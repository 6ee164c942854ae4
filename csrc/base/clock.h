// The clock of the core: monotonic nanoseconds.
#pragma once

#include <cstdint>
#include <ctime>
#include <limits>

namespace telegrad {

using Nanos = std::int64_t;

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

inline Nanos now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return Nanos{t.tv_sec} * kSecond + t.tv_nsec;
}

/// Returns `from + span`, where a span of 0 means "no limit".
inline Nanos deadline_after(Nanos from, Nanos span) { return span <= 0 || span > kNever - from ? kNever : from + span; }

}  // namespace telegrad

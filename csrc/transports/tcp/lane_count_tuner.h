// Selection of the number of lanes for large messages, by measured throughput.
//
// Lanes help if each connection is limited on its own: by a traffic shaper, by a congestion window on a long path, or
// by a network card with one processor per connection. Otherwise they cost a little. So several numbers of lanes are
// tried, and more lanes are kept only if they are faster by a margin. Slower numbers are tried again at growing
// intervals, because networks change. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace telegrad {

class LaneCountTuner {
 public:
  /// Returns the number of lanes for the next large message, up to `open`: 1, 2, 4, ... or all.
  std::size_t next(std::size_t open);

  /// Records a transfer: its bytes, lanes and time.
  void record(std::size_t lanes, std::uint64_t bytes, Nanos time);

 private:
  static constexpr std::size_t kSteps = 5;  // 1, 2, 4, 8, 16 lanes
  struct Sample {
    double rate = 0;  // bytes per nanosecond, moving average
    int samples = 0;
    int pause = 0;       // messages until it is tried again
    int next_pause = 0;  // the pause after that
  };
  static std::size_t step_of(std::size_t lanes);
  std::size_t best() const;

  std::array<Sample, kSteps> samples_by_step_;
  std::size_t steps_ = 1;
};

}  // namespace telegrad

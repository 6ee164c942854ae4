// Over how many lanes a large message is spread, by what came of it before.
//
// Lanes help where each connection by itself is held back: by a shaper, a congestion window on a long path, a card that
// has one processor for each connection. Where they do not, they cost a little. So both are tried, and the faster one
// is kept: more lanes only if they are faster by a margin. What lost is tried again now and then, more and more rarely,
// for networks change. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/clock.h"

namespace telegrad {

class LaneChoice {
 public:
  /// Lanes for the next large message, of `open` ones: 1, 2, 4, ... or all.
  std::size_t next(std::size_t open);

  /// So many bytes left over so many lanes in this time.
  void took(std::size_t lanes, std::uint64_t bytes, Nanos time);

 private:
  static constexpr std::size_t kSteps = 5;  // 1, 2, 4, 8, 16 lanes
  struct Seen {
    double rate = 0;  // bytes a nanosecond, of late
    int samples = 0;
    int pause = 0;       // messages until it is tried again
    int next_pause = 0;  // and after that
  };
  static std::size_t step_of(std::size_t lanes);
  std::size_t best() const;

  std::array<Seen, kSteps> seen_;
  std::size_t steps_ = 1;
};

}  // namespace telegrad

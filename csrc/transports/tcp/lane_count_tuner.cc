#include "transports/tcp/lane_count_tuner.h"

#include <algorithm>
#include <bit>

namespace telegrad {
namespace {

constexpr int kMinSamples = 3;       // messages before a number of lanes is compared
constexpr double kMargin = 1.1;      // more lanes must be faster by this factor
constexpr double kWeight = 0.3;      // weight of the latest message in the average
constexpr int kFirstPause = 32;      // messages after which a slower number is tried again;
constexpr int kLongestPause = 4096;  // doubled each time, up to here

}  // namespace

/// The last step stands for all lanes, however many.
std::size_t LaneCountTuner::step_of(std::size_t lanes) {
  return std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(lanes - 1)), kSteps - 1);
}

std::size_t LaneCountTuner::best() const {
  std::size_t best = 0;
  for (std::size_t step = 1; step < steps_; ++step) {
    if (samples_by_step_[step].samples >= kMinSamples &&
        samples_by_step_[step].rate > kMargin * samples_by_step_[best].rate)
      best = step;
  }
  return best;
}

std::size_t LaneCountTuner::next(std::size_t open) {
  steps_ = step_of(open) + 1;
  std::size_t chosen = steps_;
  for (std::size_t step = 0; step < steps_; ++step) {
    if (samples_by_step_[step].samples < kMinSamples) {
      chosen = step;
      break;
    }
  }
  if (chosen == steps_) {
    chosen = best();
    for (std::size_t step = 0; step < steps_; ++step) {
      Sample& other = samples_by_step_[step];
      if (step == best()) {
        other.pause = other.next_pause = 0;
      } else if (other.pause == 0) {  // it was slower just now, or its pause is over
        if (other.next_pause > 0) chosen = step;
        other.next_pause = std::clamp(2 * other.next_pause, kFirstPause, kLongestPause);
        other.pause = other.next_pause;
        if (chosen == step) break;
      } else {
        --other.pause;
      }
    }
  }
  return std::min(std::size_t{1} << chosen, open);
}

void LaneCountTuner::record(std::size_t lanes, std::uint64_t bytes, Nanos time) {
  Sample& sample = samples_by_step_[step_of(lanes)];
  const double rate = static_cast<double>(bytes) / static_cast<double>(std::max<Nanos>(time, 1));
  sample.rate = sample.samples == 0 ? rate : sample.rate + kWeight * (rate - sample.rate);
  ++sample.samples;
}

}  // namespace telegrad

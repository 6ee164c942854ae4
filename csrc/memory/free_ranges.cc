#include "memory/free_ranges.h"

#include <algorithm>
#include <bit>

#include "memory/shared_memory.h"

namespace telegrad {
namespace {

constexpr std::size_t kMaxStep = std::size_t{2} << 20;  // upper bound for the granularity of regions

}  // namespace

std::size_t region_size(std::size_t size) {
  const std::size_t step = std::clamp(std::bit_floor(std::max(size, kPage)) / 8, kPage, kMaxStep);
  return (std::max(size, std::size_t{1}) + step - 1) / step * step;
}

void FreeRanges::add(std::uint32_t chunk, std::size_t offset, std::size_t size) {
  auto next = by_place_.lower_bound({chunk, offset});
  if (next != by_place_.end() && next->first == std::pair(chunk, offset + size)) {
    size += next->second;
    remove(next++);
  }
  if (next != by_place_.begin()) {
    const auto before = std::prev(next);
    if (before->first.first == chunk && before->first.second + before->second == offset) {
      offset = before->first.second;
      size += before->second;
      remove(before);
    }
  }
  by_place_.emplace(std::pair(chunk, offset), size);
  by_size_.emplace(size, chunk, offset);
}

std::optional<FreeRanges::Place> FreeRanges::allocate(std::size_t size) {
  const auto best = by_size_.lower_bound({size, 0, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [room, chunk, offset] = *best;
  remove(by_place_.find({chunk, offset}));
  if (room > size) add(chunk, offset + size, room - size);
  return Place{.chunk = chunk, .offset = offset};
}

void FreeRanges::remove_chunk(std::uint32_t chunk) {
  for (auto range = by_place_.lower_bound({chunk, 0}); range != by_place_.end() && range->first.first == chunk;) {
    remove(range++);
  }
}

void FreeRanges::remove(ByPlace::iterator range) {
  by_size_.erase({range->second, range->first.first, range->first.second});
  by_place_.erase(range);
}

}  // namespace telegrad

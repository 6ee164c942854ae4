// What is free of some chunks of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace telegrad {

/// Bytes that a region for `size` bytes takes: whole pages, and such that regions which differ by less than an eighth
/// are the same, so that one fits where the other was.
std::size_t region_size(std::size_t size);

/// Free ranges, joined with their neighbours. Not thread-safe.
class FreeRanges {
 public:
  struct Place {
    std::uint32_t chunk;
    std::size_t offset;
  };

  void add(std::uint32_t chunk, std::size_t offset, std::size_t size);
  /// Takes `size` bytes of the smallest range that has so many.
  std::optional<Place> take(std::size_t size);
  /// There is no such chunk any more.
  void forget(std::uint32_t chunk);

 private:
  using ByPlace = std::map<std::pair<std::uint32_t, std::size_t>, std::size_t>;  // chunk, offset: size

  void remove(ByPlace::iterator range);

  ByPlace by_place_;
  std::set<std::tuple<std::size_t, std::uint32_t, std::size_t>> by_size_;  // size, chunk, offset
};

}  // namespace telegrad

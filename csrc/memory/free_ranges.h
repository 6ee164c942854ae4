// Free memory of chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace telegrad {

/// Returns the size of the region for `size` bytes: whole pages, rounded so that sizes which differ by less than an
/// eighth share one region size. A released region then fits the next one.
std::size_t region_size(std::size_t size);

/// Free ranges, merged with their neighbors. Not thread-safe.
class FreeRanges {
 public:
  struct Place {
    std::uint32_t chunk;
    std::size_t offset;
  };

  void add(std::uint32_t chunk, std::size_t offset, std::size_t size);
  /// Allocates `size` bytes from the smallest range that is large enough.
  std::optional<Place> allocate(std::size_t size);
  /// Removes a chunk.
  void remove_chunk(std::uint32_t chunk);

 private:
  using ByPlace = std::map<std::pair<std::uint32_t, std::size_t>, std::size_t>;  // chunk, offset: size

  void remove(ByPlace::iterator range);

  ByPlace by_place_;
  std::set<std::tuple<std::size_t, std::uint32_t, std::size_t>> by_size_;  // size, chunk, offset
};

}  // namespace telegrad

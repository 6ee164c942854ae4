// Free ranges of chunks, compared with a map of every page.
#include "memory/free_ranges.h"

#include <optional>
#include <vector>

#include "memory/shared_memory.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

CASE(region_sizes_are_whole_pages_and_close) {
  for (std::size_t size = 0; size < std::size_t{1} << 30; size += size / 3 + 1) {
    const std::size_t region = region_size(size);
    CHECK(region >= size && region % kPage == 0);
    CHECK(region <= size + std::max(size / 8, kPage));
  }
}

CASE(neighbors_are_merged) {
  FreeRanges free;
  free.add(1, 0, 30);
  free.add(2, 30, 10);  // ranges of different chunks are not neighbors
  CHECK(!free.allocate(40));
  free.add(1, 60, 10);
  free.add(1, 30, 30);
  const auto all = free.allocate(70);
  CHECK(all && all->chunk == 1 && all->offset == 0);
  CHECK(!free.allocate(20));
}

CASE(the_smallest_sufficient_range_is_used) {
  FreeRanges free;
  free.add(1, 0, 100);
  free.add(2, 0, 10);
  free.add(3, 0, 20);
  CHECK_EQ(free.allocate(10)->chunk, 2u);
  CHECK_EQ(free.allocate(5)->chunk, 3u);
  free.remove_chunk(3);
  free.remove_chunk(1);
  CHECK(!free.allocate(1));
}

CASE(no_page_is_lost_or_allocated_twice) {
  constexpr std::size_t kSize = 200;
  FreeRanges free;
  std::vector<bool> used(kSize, false);
  struct Taken {
    std::size_t offset, size;
  };
  std::vector<Taken> taken;
  free.add(7, 0, kSize);
  Random random(3);
  for (int turn = 0; turn < times(20000); ++turn) {
    if (random.below(2) == 0) {
      const std::size_t size = 1 + random.below(20);
      const auto place = free.allocate(size);
      if (!place) continue;
      CHECK(place->chunk == 7 && place->offset + size <= kSize);
      for (std::size_t i = 0; i < size; ++i) {
        CHECK(!used[place->offset + i]);
        used[place->offset + i] = true;
      }
      taken.push_back({place->offset, size});
    } else if (!taken.empty()) {
      std::swap(taken[random.below(taken.size())], taken.back());
      free.add(7, taken.back().offset, taken.back().size);
      for (std::size_t i = 0; i < taken.back().size; ++i) used[taken.back().offset + i] = false;
      taken.pop_back();
    }
  }
  for (const Taken& t : taken) free.add(7, t.offset, t.size);
  CHECK_EQ(free.allocate(kSize)->offset, 0u);
}

}  // namespace
}  // namespace telegrad::test

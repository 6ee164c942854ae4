// Receive memory: exact sizes, alignment, reuse, the limit of the cache, trimming, and blocks that outlive the engine.
#include "memory/buffer_pool.h"

#include <cstring>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

void fill(Block& block) {
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % kAlignment, 0u);
  if (block.size() == 0) return;
  std::memset(block.data(), 0x5a, block.size());  // the address sanitizer checks the bounds
}

CASE(every_size_is_usable_and_aligned) {
  auto pool = BufferPool::make(kMiB);
  for (std::size_t size = 0; size < 20000; size += 1 + size / 50) {
    auto block = pool->allocate(size);
    CHECK_EQ(block->size(), size);
    fill(*block);
  }
  for (std::size_t power = 6; power < 24; ++power) {
    for (const std::size_t size :
         {(std::size_t{1} << power) - 1, std::size_t{1} << power, (std::size_t{1} << power) + 1,
          (std::size_t{5} << power) / 4, (std::size_t{5} << power) / 4 + 1}) {
      fill(*pool->allocate(size));
    }
  }
}

CASE(little_of_a_block_is_unused) {
  auto pool = BufferPool::make(0);
  for (std::size_t size = 4096; size < 64 * kMiB; size = size * 9 / 8 + 1) {
    auto block = pool->allocate(size);
    const std::size_t capacity = pool->stats().live_bytes;
    CHECK(capacity >= size);
    CHECK(capacity <= size + size / 4 + 1);
  }
}

CASE(a_released_block_is_reused) {
  auto pool = BufferPool::make(10 * kMiB);
  auto first = pool->allocate(kMiB);
  std::byte* const memory = first->data();
  first.reset();
  CHECK_EQ(pool->stats().cached_blocks, 1u);
  auto again = pool->allocate(kMiB - 1000);  // of the same class
  CHECK_EQ(again->data(), memory);
  CHECK_EQ(again->size(), kMiB - 1000);
  const BufferPoolStats s = pool->stats();
  CHECK_EQ(s.hits, 1u);
  CHECK_EQ(s.misses, 1u);
  CHECK_EQ(s.live_blocks, 1u);
  CHECK_EQ(s.cached_blocks, 0u);
  CHECK_EQ(s.cached_bytes, 0u);
}

CASE(the_cache_is_limited) {
  auto pool = BufferPool::make(3 * kMiB);
  std::vector<BlockPtr> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(pool->allocate(kMiB));
  CHECK_EQ(pool->stats().live_bytes, 10 * kMiB);
  blocks.clear();
  CHECK_EQ(pool->stats().cached_bytes, 3 * kMiB);
  CHECK_EQ(pool->stats().live_blocks, 0u);
  CHECK_EQ(pool->stats().live_bytes, 0u);
}

CASE(trim_releases_unused_memory) {
  auto pool = BufferPool::make(100 * kMiB);
  {
    auto a = pool->allocate(kMiB), b = pool->allocate(kMiB), c = pool->allocate(5 * kMiB);
  }
  const Nanos between = now();
  {
    auto used_since = pool->allocate(kMiB);
  }
  CHECK_EQ(pool->stats().cached_blocks, 3u);
  pool->trim(between);
  CHECK_EQ(pool->stats().cached_blocks, 1u);
  CHECK_EQ(pool->stats().cached_bytes, kMiB);
  pool->trim(kNever);
  CHECK_EQ(pool->stats().cached_blocks, 0u);
  CHECK_EQ(pool->stats().cached_bytes, 0u);
}

CASE(small_blocks_are_not_cached) {
  auto pool = BufferPool::make(kMiB);
  {
    auto small = pool->allocate(100);
  }
  CHECK_EQ(pool->stats().cached_blocks, 0u);
  CHECK_EQ(pool->stats().live_bytes, 0u);
}

CASE(a_block_outlives_the_owner_of_the_pool) {
  BlockPtr block;
  {
    auto pool = BufferPool::make(kMiB);
    block = pool->allocate(50000);
  }
  fill(*block);
}

CASE(a_retired_pool_caches_nothing) {
  auto pool = BufferPool::make(10 * kMiB);
  auto out = pool->allocate(kMiB);
  pool->allocate(kMiB).reset();
  CHECK_EQ(pool->stats().cached_blocks, 1u);
  pool->disable_cache();
  CHECK_EQ(pool->stats().cached_blocks, 0u);
  fill(*out);
  out.reset();
  const BufferPoolStats s = pool->stats();
  CHECK_EQ(s.live_blocks, 0u);
  CHECK_EQ(s.cached_blocks, 0u);
  CHECK_EQ(s.cached_bytes, 0u);
}

CASE(excessive_sizes_are_rejected) {
  auto pool = BufferPool::make(kMiB);
  for (const std::size_t size : {SIZE_MAX, SIZE_MAX / 2, std::size_t{1} << 48}) {
    bool refused = false;
    try {
      pool->allocate(size);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
  CHECK_EQ(pool->stats().live_blocks, 0u);
}

CASE(any_thread_may_release_blocks) {
  auto pool = BufferPool::make(4 * kMiB);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<BlockPtr> passed;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t));
      for (int i = 0; i < times(5000); ++i) {
        auto block = pool->allocate(random.below(100'000));
        if (block->size() > 0) block->data()[block->size() - 1] = std::byte{1};
        std::lock_guard lock(mutex);
        passed.push_back(std::move(block));
        if (passed.size() > 20) passed.erase(passed.begin() + static_cast<std::ptrdiff_t>(random.below(20)));
        if (i % 100 == 0) pool->trim(now());
      }
    });
  }
  for (auto& t : threads) t.join();
  passed.clear();
  const BufferPoolStats s = pool->stats();
  CHECK_EQ(s.live_blocks, 0u);
  CHECK_EQ(s.live_bytes, 0u);
  CHECK(s.cached_bytes <= 4 * kMiB);
  CHECK_EQ(s.hits + s.misses, static_cast<std::uint64_t>(4 * times(5000)));
}

}  // namespace
}  // namespace telegrad::test

#include "memory/buffer_pool.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

namespace telegrad {
namespace {

// Size classes: four per power of two from 4 KiB on, so at most a fifth of a block is unused.
// Smaller blocks are single malloc allocations, which malloc caches itself.
constexpr std::size_t kMinPooled = 4096;
constexpr int kClasses = 4 * 36;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

int class_of(std::size_t size) {
  const int power = std::bit_width(size - 1) - 1;  // size in (2^power, 2^(power+1)]
  const std::size_t step = (std::size_t{1} << power) / 4;
  const int quarter = static_cast<int>((size - (std::size_t{1} << power) + step - 1) / step);  // 1..4
  const int index = (power - 11) * 4 + quarter - 1;
  if (index >= kClasses) throw std::bad_alloc();
  return index;
}

std::size_t capacity_of(int size_class) {
  const int power = size_class / 4 + 11;
  return (std::size_t{1} << power) + (static_cast<std::size_t>(size_class % 4) + 1) * ((std::size_t{1} << power) / 4);
}

std::byte* obtain(std::size_t capacity) {
  if (capacity < kHugePage) {
    void* memory = std::aligned_alloc(kAlignment, (capacity + kAlignment - 1) / kAlignment * kAlignment);
    if (!memory) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, capacity) != 0) throw std::bad_alloc();
  madvise(memory, capacity, MADV_HUGEPAGE);  // only an optimization: ignore errors
  return static_cast<std::byte*>(memory);
}

}  // namespace

/// Object and memory in one allocation, for messages so small that two more allocations and a lock would dominate.
class SmallBlock final : public Block {
 public:
  static BlockPtr make(std::size_t size, std::shared_ptr<BufferPool> pool) {
    void* room = std::malloc(sizeof(SmallBlock) + kAlignment + size);
    if (!room) throw std::bad_alloc();
    const auto first = reinterpret_cast<std::uintptr_t>(room) + sizeof(SmallBlock);
    auto* data = reinterpret_cast<std::byte*>((first + kAlignment - 1) / kAlignment * kAlignment);
    return BlockPtr(new (room) SmallBlock(data, size, std::move(pool)));
  }
  ~SmallBlock() override {
    pool_->small_bytes_.fetch_sub(size(), std::memory_order_relaxed);
    pool_->small_blocks_.fetch_sub(1, std::memory_order_relaxed);
  }
  static void* operator new(std::size_t, void* room) { return room; }
  static void operator delete(void* room) { std::free(room); }

 private:
  SmallBlock(std::byte* data, std::size_t size, std::shared_ptr<BufferPool> pool)
      : Block(data, size), pool_(std::move(pool)) {
    pool_->small_bytes_.fetch_add(size, std::memory_order_relaxed);
    pool_->small_blocks_.fetch_add(1, std::memory_order_relaxed);
    pool_->small_misses_.fetch_add(1, std::memory_order_relaxed);
  }

  std::shared_ptr<BufferPool> pool_;
};

class LeasedBlock final : public Block {
 public:
  LeasedBlock(BlockPtr block, std::shared_ptr<BufferPool> pool)
      : Block(block->data(), block->size()), block_(std::move(block)), pool_(std::move(pool)) {
    pool_->small_bytes_.fetch_add(size(), std::memory_order_relaxed);
    pool_->small_blocks_.fetch_add(1, std::memory_order_relaxed);
  }
  ~LeasedBlock() override {
    pool_->small_bytes_.fetch_sub(size(), std::memory_order_relaxed);
    pool_->small_blocks_.fetch_sub(1, std::memory_order_relaxed);
  }
  std::uint64_t lease() const override { return block_->lease(); }

 private:
  const BlockPtr block_;
  const std::shared_ptr<BufferPool> pool_;
};

class PooledBlock final : public Block {
 public:
  PooledBlock(std::byte* memory, std::size_t size, int size_class, std::shared_ptr<BufferPool> pool)
      : Block(memory, size), size_class_(size_class), pool_(std::move(pool)) {}
  ~PooledBlock() override { pool_->put_back(data(), size_class_); }

 private:
  int size_class_;
  std::shared_ptr<BufferPool> pool_;
};

std::shared_ptr<BufferPool> BufferPool::make(std::size_t cache_limit, std::shared_ptr<MemoryBudget> budget) {
  return std::shared_ptr<BufferPool>(new BufferPool(cache_limit, std::move(budget)));
}

BufferPool::BufferPool(std::size_t cache_limit, std::shared_ptr<MemoryBudget> budget)
    : cache_limit_(cache_limit), budget_(std::move(budget)), free_(kClasses) {}

BufferPool::~BufferPool() { trim(kNever); }

BlockPtr BufferPool::allocate(std::size_t size) {
  if (size < kMinPooled) return SmallBlock::make(size, shared_from_this());
  const int size_class = class_of(size);
  const std::size_t capacity = capacity_of(size_class);
  std::byte* memory;
  {
    std::unique_lock lock(mutex_);
    auto& free = free_[size_class];
    if (!free.empty()) {
      memory = free.back().memory;
      free.pop_back();
      stats_.cached_blocks -= 1;
      stats_.cached_bytes -= capacity;
      if (budget_) budget_->release(capacity);
      stats_.hits += 1;
    } else {
      stats_.misses += 1;
      lock.unlock();
      memory = obtain_or_trim(capacity);
      lock.lock();
    }
    stats_.live_blocks += 1;
    stats_.live_bytes += capacity;
  }
  return std::make_unique<PooledBlock>(memory, size, size_class, shared_from_this());
}

/// Allocates memory from the system. If there is none, releases the cache first and tries again.
std::byte* BufferPool::obtain_or_trim(std::size_t capacity) {
  try {
    return obtain(capacity);
  } catch (const std::bad_alloc&) {
    trim(kNever);
    return obtain(capacity);
  }
}

void BufferPool::put_back(std::byte* memory, int size_class) {
  {
    std::lock_guard lock(mutex_);
    const std::size_t capacity = capacity_of(size_class);
    stats_.live_blocks -= 1;
    stats_.live_bytes -= capacity;
    if (stats_.cached_bytes + capacity <= cache_limit_ && (!budget_ || budget_->reserve(capacity))) {
      free_[size_class].push_back({memory, now()});
      stats_.cached_blocks += 1;
      stats_.cached_bytes += capacity;
      return;
    }
  }
  std::free(memory);
}

BlockPtr BufferPool::adopt(BlockPtr block) {
  return std::make_unique<LeasedBlock>(std::move(block), shared_from_this());
}

void BufferPool::trim(Nanos before) {
  std::vector<std::byte*> unused;
  {
    std::lock_guard lock(mutex_);
    for (int c = 0; c < kClasses; ++c) {
      auto& list = free_[c];
      std::size_t n = 0;
      while (n < list.size() && list[n].since < before) unused.push_back(list[n++].memory);
      list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(n));
      stats_.cached_blocks -= n;
      stats_.cached_bytes -= n * capacity_of(c);
      if (budget_) budget_->release(n * capacity_of(c));
    }
  }
  for (std::byte* memory : unused) std::free(memory);
}

void BufferPool::disable_cache() {
  {
    std::lock_guard lock(mutex_);
    cache_limit_ = 0;
  }
  trim(kNever);
}

BufferPoolStats BufferPool::stats() const {
  std::lock_guard lock(mutex_);
  BufferPoolStats all = stats_;
  all.live_blocks += small_blocks_.load(std::memory_order_relaxed);
  all.live_bytes += small_bytes_.load(std::memory_order_relaxed);
  all.misses += small_misses_.load(std::memory_order_relaxed);
  return all;
}

}  // namespace telegrad

// Receive memory: 64-byte aligned blocks, cached between messages.
//
// Page faults on fresh memory cost several times the copy that fills it, so a released block is cached for the next
// message of its size class. The cache is bounded, and `trim` returns memory to the system while the worker is idle.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "memory/block.h"
#include "memory/memory_budget.h"

namespace telegrad {

struct BufferPoolStats {
  std::size_t live_blocks = 0;    // allocated and not released
  std::size_t live_bytes = 0;     // their capacity
  std::size_t cached_blocks = 0;  // kept for reuse
  std::size_t cached_bytes = 0;
  std::uint64_t hits = 0;  // allocations served from the cache
  std::uint64_t misses = 0;
};

/// Allocator of receive memory. Thread-safe. Every block keeps the pool alive.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// `cache_limit`: bytes cached at most. `budget`: of cached bytes, and of others; null for no limit.
  static std::shared_ptr<BufferPool> make(std::size_t cache_limit, std::shared_ptr<MemoryBudget> budget = {});
  ~BufferPool();

  /// Returns a block of exactly `size` usable bytes. Throws std::bad_alloc if the system has no memory.
  BlockPtr allocate(std::size_t size);

  /// Counts a leased block as allocated for as long as it lives.
  BlockPtr adopt(BlockPtr block);

  /// Releases cached memory that has not been used since `before`.
  void trim(Nanos before);

  /// Disables the cache: releases cached memory, and from now on every block at once. Allocated blocks stay valid.
  void disable_cache();

  BufferPoolStats stats() const;

  /// Hooks of fork(): hold the lock.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  friend class PooledBlock;
  friend class SmallBlock;
  friend class LeasedBlock;
  struct Free {
    std::byte* memory;
    Nanos since;
  };

  BufferPool(std::size_t cache_limit, std::shared_ptr<MemoryBudget> budget);
  std::byte* obtain_or_trim(std::size_t capacity);
  void put_back(std::byte* memory, int size_class);

  mutable std::mutex mutex_;
  std::size_t cache_limit_;
  const std::shared_ptr<MemoryBudget> budget_;
  std::vector<std::vector<Free>> free_;                          // by size class, most recently used last
  BufferPoolStats stats_;                                        // without small blocks, which take no lock
  std::atomic<std::size_t> small_blocks_ = 0, small_bytes_ = 0;  // small and leased blocks
  std::atomic<std::uint64_t> small_misses_ = 0;
};

}  // namespace telegrad

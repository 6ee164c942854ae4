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

#include "core/clock.h"

namespace telegrad {

inline constexpr std::size_t kAlignment = 64;

/// Memory of one received segment. Its destructor returns the memory to its source: the pool, or the peer that leased
/// it. Has one owner at a time; may be destroyed on any thread.
class Block {
 public:
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// Returns the lease (OutSegment::lease) that returns this memory, or a part of it, to the peer from which it came; 0
  /// if there is none.
  virtual std::uint64_t lease() const { return 0; }

 protected:
  Block(std::byte* data, std::size_t size) : data_(data), size_(size) {}

 private:
  std::byte* data_;
  std::size_t size_;
};

using BlockPtr = std::unique_ptr<Block>;

struct PoolStats {
  std::size_t live_blocks = 0;    // allocated and not released
  std::size_t live_bytes = 0;     // their capacity
  std::size_t cached_blocks = 0;  // kept for reuse
  std::size_t cached_bytes = 0;
  std::uint64_t hits = 0;  // allocations served from the cache
  std::uint64_t misses = 0;
};

/// Allocator of receive memory. Thread-safe. Every block keeps the pool alive.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  /// `cache_limit`: bytes cached at most.
  static std::shared_ptr<Pool> make(std::size_t cache_limit);
  ~Pool();

  /// Returns a block of exactly `size` usable bytes. Throws std::bad_alloc if the system has no memory.
  BlockPtr allocate(std::size_t size);

  /// Counts a leased block as allocated for as long as it lives.
  BlockPtr count(BlockPtr lent);

  /// Releases cached memory that has not been used since `before`.
  void trim(Nanos before);

  /// Disables the cache: releases cached memory, and from now on every block at once. Allocated blocks stay valid.
  void retire();

  PoolStats stats() const;

  /// Hooks of fork(): hold the lock.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  friend class PooledBlock;
  friend class SmallBlock;
  friend class LentBlock;
  struct Free {
    std::byte* memory;
    Nanos since;
  };

  explicit Pool(std::size_t cache_limit);
  std::byte* obtain_or_trim(int size_class);
  void give_back(std::byte* memory, int size_class);

  mutable std::mutex mutex_;
  std::size_t cache_limit_;
  std::vector<std::vector<Free>> free_;                          // by size class, most recently used last
  PoolStats stats_;                                              // without small blocks, which take no lock
  std::atomic<std::size_t> small_blocks_ = 0, small_bytes_ = 0;  // small and leased blocks
  std::atomic<std::uint64_t> small_misses_ = 0;
};

}  // namespace telegrad

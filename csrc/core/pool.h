// Receive memory: 64-byte aligned blocks, kept warm between messages.
//
// Fresh pages cost several times the copy that fills them, so a block that comes back is kept for the next
// message of its size class. What is kept is capped, and `trim` gives it back to the system when the worker idles.
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

/// Memory of one received segment. Its destructor gives the memory back to wherever it came from: the pool, or, for
/// a transport that lends memory, the peer that lent it. Owned by one holder at a time; may be destroyed on any thread.
class Block {
 public:
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// What OutSegment::lease says to hand this memory, or a part of it, to the peer whose link it came over; 0: nothing.
  virtual std::uint64_t lease() const { return 0; }

 protected:
  Block(std::byte* data, std::size_t size) : data_(data), size_(size) {}

 private:
  std::byte* data_;
  std::size_t size_;
};

using BlockPtr = std::unique_ptr<Block>;

struct PoolStats {
  std::size_t live_blocks = 0;    // handed out and not yet back
  std::size_t live_bytes = 0;     // their capacity
  std::size_t cached_blocks = 0;  // kept warm
  std::size_t cached_bytes = 0;
  std::uint64_t hits = 0;  // allocations served warm
  std::uint64_t misses = 0;
};

/// Thread-safe. Blocks may outlive every other holder of the pool: each keeps it alive.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  /// `cache_limit`: bytes kept warm at most.
  static std::shared_ptr<Pool> make(std::size_t cache_limit);
  ~Pool();

  /// A block of exactly `size` usable bytes. Throws std::bad_alloc when the machine has no such memory.
  BlockPtr allocate(std::size_t size);

  /// Counts a block that a link has lent among those handed out, for as long as it lives.
  BlockPtr count(BlockPtr lent);

  /// Frees what has been kept warm without use since `before`.
  void trim(Nanos before);

  /// Nobody will ask for memory any more: frees what is kept warm, and from now on whatever comes back. Blocks that are
  /// out stay valid.
  void retire();

  PoolStats stats() const;

  /// Around fork(): holds the lock.
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
  PoolStats stats_;                                              // but for small blocks, which nobody locks for
  std::atomic<std::size_t> small_blocks_ = 0, small_bytes_ = 0;  // these and lent ones
  std::atomic<std::uint64_t> small_misses_ = 0;
};

}  // namespace telegrad

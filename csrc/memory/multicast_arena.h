// Multicast: data for several peers of this host is in shared memory once, and every receiver maps and reads it. While
// any process has it, no process writes to it. The receivers see it through private views (peer_arena.h), so each owns
// its tensors.
//
// A link passes the file of a chunk to its peer before the first buffer in it, and passes buffers on once the peer has
// mapped the chunk. Until then, and if mapping is impossible, it sends bytes. It records the leases of its peer
// (arena.h). A peer that closes its worker but keeps tensors may still read leases that it has not returned when its
// link ends. So this memory is never written to again: the chunk gets no new buffers and is released with its last one.
// The kernel frees the pages once the last process with a mapping has unmapped them or died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "memory/free_ranges.h"
#include "memory/memory_budget.h"
#include "memory/shared_memory.h"

namespace telegrad {

class Arena;
class MulticastArena;

/// Multicast buffer: data to send to several peers. Its creator fills it and then adds it to messages. Once the last of
/// these has been destroyed, only the receivers keep the memory.
class MulticastBuffer {
 public:
  MulticastBuffer(std::uint64_t lease, std::byte* data, std::size_t size,
                  std::shared_ptr<MulticastArena> multicast_arena)
      : lease_(lease), data_(data), size_(size), arena_(std::move(multicast_arena)) {}
  ~MulticastBuffer();
  MulticastBuffer(const MulticastBuffer&) = delete;
  MulticastBuffer& operator=(const MulticastBuffer&) = delete;

  std::uint64_t lease() const { return lease_; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::shared_ptr<MulticastArena>& multicast_arena() const { return arena_; }

 private:
  const std::uint64_t lease_;
  std::byte* const data_;
  const std::size_t size_;
  const std::shared_ptr<MulticastArena> arena_;
};

/// Chunks from this number on are multicast memory.
inline constexpr std::uint32_t kMulticastChunks = std::uint32_t{1} << 31;

/// The multicast memory of one engine. Thread-safe. Its lock is taken after that of an arena, never before.
class MulticastArena : public std::enable_shared_from_this<MulticastArena> {
 public:
  struct Stats {
    std::size_t buffers = 0;  // buffers in use by a message or a receiver
    std::size_t bytes = 0;    // of all chunks
  };

  /// `limit`: bytes of all chunks together at most.
  /// `budget`: of all chunks of the worker; null for no limit.
  explicit MulticastArena(std::uint64_t limit, std::shared_ptr<MemoryBudget> budget = {})
      : limit_(limit), budget_(std::move(budget)) {}

  /// Allocates a buffer of `size` bytes; null if there is no memory. May reserve pages, which takes as long as filling
  /// them.
  std::shared_ptr<MulticastBuffer> allocate(std::size_t size);
  /// Releases chunks that have not been used since `before`.
  void trim(Nanos before);
  Stats stats();
  /// Returns the bytes of all chunks.
  std::size_t size() const { return total_.load(std::memory_order_relaxed); }

  // ---- for arenas

  /// Registers an arena for a peer that may get buffers. It is asked for returned leases when room is needed.
  void add_arena(const std::weak_ptr<Arena>& arena);
  struct Offer {
    std::size_t size;
    int file;  // of the chunk, valid while the chunk contains a buffer
  };
  Offer offer(std::uint32_t chunk);
  bool has(std::uint32_t chunk);
  /// Counts one more receiver of a buffer that has a holder.
  void add_holder(std::uint64_t lease);
  void remove_holder(std::uint64_t lease);
  /// Records that a receiver will never return the lease of a buffer.
  void abandon(std::uint64_t lease);

 private:
  struct Chunk {
    SharedMemory memory;
    BudgetShare share;
    std::size_t buffers = 0;
    Nanos idle_since = 0;
    bool abandoned = false;
  };
  struct Buffer {
    std::size_t size;
    std::size_t holders;
  };
  using Chunks = std::map<std::uint32_t, Chunk>;

  void collect();
  std::shared_ptr<MulticastBuffer> take_free(std::size_t size);
  std::size_t chunk_size_for(std::size_t size);
  void drop(Chunks::iterator chunk);

  const std::uint64_t limit_;
  const std::shared_ptr<MemoryBudget> budget_;
  std::vector<std::weak_ptr<Arena>> arenas_;
  Chunks chunks_;
  std::uint32_t next_ = kMulticastChunks;
  std::atomic<std::size_t> total_ = 0;
  Nanos no_growth_before_ = 0;
  FreeRanges free_;
  std::map<std::uint64_t, Buffer> buffers_;  // by lease
};

}  // namespace telegrad

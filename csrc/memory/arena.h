// Shared memory into which one end of a link copies tensors and from which the other end reads them. Each direction has
// an arena: chunks of memory that belong to the sender and are mapped by the receiver as well.
//
// A region of a chunk is passed on by its lease, a number. From then on the receiver may read and write it, until it
// returns the lease by appending it to a list in shared memory (Returns). The sender reads this list when it next needs
// room, so neither end wakes the other. A tensor is copied once, into warm memory, and its pages are not faulted in or
// zeroed again.
//
// The receiver may also return a region without a copy, as part of a message (zero-copy return). Then the region
// belongs to the sender's program, like a leased one.
//
// A region may also be leased to the sending program, which writes a tensor directly into it. It is then passed on
// without a copy, and the program must have released it. Before a fork, such a region becomes private to the process,
// so that parent and child each have their own; it is copied when it is sent.
//
// A chunk is used once the receiver has confirmed that it has mapped it. Until then, and if there is no room, nothing
// is leased and bytes go through the ring. Only large segments wait for a chunk that has been offered. Chunks that have
// not been used for a while are released.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/clock.h"
#include "base/fork_handlers.h"
#include "base/thread_safety.h"
#include "memory/block.h"
#include "memory/free_ranges.h"
#include "memory/memory_budget.h"
#include "memory/multicast_arena.h"
#include "memory/shared_memory.h"

namespace telegrad {

/// Ring of returned leases, in shared memory; all zero initially.
struct ReleaseQueue {
  static constexpr std::uint64_t kSlots = 4096;
  alignas(64) std::atomic<std::uint64_t> returned;  // returned so far, by the receiver
  alignas(64) std::atomic<std::uint64_t> consumed;  // read so far, by the sender
  alignas(64) std::atomic<std::uint64_t> leases[kSlots];
};

/// Location of a segment: the number of its chunk and its offset.
struct Lease {
  static constexpr int kOffsetBits = 32;
  // Flag: a zero-copy return to the receiver of this message, which owns the memory. Chunk numbers stay below it.
  static constexpr std::uint64_t kReturned = std::uint64_t{1} << 62;

  static std::uint64_t of(std::uint32_t chunk, std::size_t offset) {
    return std::uint64_t{chunk} << kOffsetBits | offset / kAlignment;
  }
  static std::uint32_t chunk(std::uint64_t lease) { return static_cast<std::uint32_t>(lease >> kOffsetBits); }
  static std::size_t offset(std::uint64_t lease) {
    return static_cast<std::size_t>(lease & ((std::uint64_t{1} << kOffsetBits) - 1)) * kAlignment;
  }
  /// Returns whether other peers read the memory too, so that the receiver must not write to it.
  static bool is_multicast(std::uint64_t lease) { return chunk(lease) >= kMulticastChunks; }
  static bool is_returned(std::uint64_t lease) { return (lease & kReturned) != 0; }
};

/// The sender's side. Any thread; holds its lock for microseconds only.
class Arena final : public ForkHandler, public std::enable_shared_from_this<Arena> {
 public:
  /// Sends control packets to the peer. Returns false if this is impossible now; the arena then tries again later.
  class Messenger {
   public:
    virtual ~Messenger() = default;
    virtual bool offer(std::uint32_t chunk, std::size_t size, int file) = 0;
    virtual bool drop(std::uint32_t chunk) = 0;
  };

  static std::shared_ptr<Arena> make(ReleaseQueue* releases);
  ~Arena() override;

  /// `limit`: bytes of all chunks together at most.
  void set_limit(std::uint64_t limit) { limit_.store(limit, std::memory_order_relaxed); }

  /// `budget`: of the chunks of all arenas of the worker; null for no limit.
  void set_budget(std::shared_ptr<MemoryBudget> budget);

  struct Allocation {
    std::uint64_t lease;
    std::byte* data;
  };
  /// Allocates a region of `size` bytes, which the caller holds. Returns nothing if there is no room; the arena then
  /// grows with `grow`.
  std::optional<Allocation> allocate(std::size_t size);
  /// Leases a region to the program, as a block to write to.
  std::optional<LinkLease> lease(std::size_t size);
  /// Passes a region from the caller to the receiver.
  void pass(std::uint64_t lease);
  /// Passes leased memory, the whole or a part, to the receiver and returns the lease to send. Returns 0 if the memory
  /// is not of this arena or cannot be passed on; it must be copied then.
  std::uint64_t pass_leased(const OutSegment& segment);
  /// Takes back a region, the whole or a part, that the receiver returns without a copy. From now on it belongs to this
  /// program. Returns null if the receiver does not have it. May throw std::bad_alloc.
  BlockPtr take_returned(std::uint64_t lease, std::size_t size);

  /// Announces the chunk of a multicast buffer to the receiver, once. Returns whether the receiver has mapped it.
  bool announce(const MulticastBuffer& buffer, Messenger& messenger);
  /// Passes a multicast buffer to the receiver and returns the lease to send, or 0.
  std::uint64_t pass_multicast(const OutSegment& segment, Messenger& messenger);
  /// Processes the leases that the receiver has returned.
  void collect();

  enum class Growth {
    kNone,     // nothing is needed, or growth is impossible for now: the limit, the system or the peer does not allow
               // it, or the peer cannot be notified
    kMore,     // call again: there is more to do
    kOffered,  // a chunk was offered to the peer; `on_answer` follows
  };
  /// Does one step towards a new chunk, if a region was missing.
  Growth grow(Messenger& messenger);
  /// Processes the peer's answer to an offered chunk: mapped or not.
  void on_answer(std::uint32_t chunk, bool mapped);
  /// Releases chunks that have not been used since `before`.
  void trim(Nanos before, Messenger& messenger);
  /// Returns the bytes of all chunks.
  std::size_t size() const { return total_.load(std::memory_order_relaxed); }

  /// Ends the arena with its link: no lease is returned or granted any more, and no descriptor is kept. Memory that the
  /// program holds stays valid; a chunk is released when the program holds none of it.
  void close();
  /// Returns whether the receiver has returned a lease that it did not have.
  bool corrupt() const { return corrupt_.load(std::memory_order_relaxed); }

  void before_fork() NO_THREAD_SAFETY_ANALYSIS override;
  void after_fork_in_parent() NO_THREAD_SAFETY_ANALYSIS override;
  void after_fork_in_child() NO_THREAD_SAFETY_ANALYSIS override;

 private:
  class Holder;
  struct Chunk {
    SharedMemory memory;
    BudgetShare share;
    std::size_t reserved = 0;
    bool offered = false;
    bool mapped = false;   // also by the receiver
    std::size_t used = 0;  // bytes
    Nanos idle_since = 0;
  };
  struct Region {
    std::size_t size;  // in whole pages
    int holders;       // on this side: the program, and messages that are being sent
    bool leased;       // leased to the program
    bool passed = false;
    bool is_private = false;  // since a fork, or the end of the link
  };
  using Regions = std::map<std::uint64_t, Region>;  // by lease
  struct MulticastChunk {
    bool offered = false;
    bool mapped = false;  // by the receiver
  };

  explicit Arena(ReleaseQueue* releases) : releases_(releases) {}
  std::optional<Allocation> allocate(std::size_t size, bool leased);
  std::optional<Allocation> try_allocate(std::size_t size, bool leased) REQUIRES(mutex_);
  /// Returns whether the list of returned leases has room for one more: every allocated region may be passed on.
  bool has_slot() const REQUIRES(mutex_) { return regions_.size() + multicast_leases_.size() < ReleaseQueue::kSlots; }
  Regions::iterator region_of(std::uint64_t lease) REQUIRES(mutex_);
  std::byte* data_of(std::uint64_t lease) REQUIRES(mutex_);
  bool process_returns() REQUIRES(mutex_);
  bool process_return(std::uint64_t lease) REQUIRES(mutex_);
  bool announce_locked(const MulticastBuffer& buffer, Messenger& messenger) REQUIRES(mutex_);
  bool is_held_by_program(const Region& region) const { return region.leased && region.holders > 0 && !region.passed; }
  void release(std::uint64_t lease);
  void free_if_unused(Regions::iterator region) REQUIRES(mutex_);
  bool begin_chunk(Messenger& messenger) REQUIRES(mutex_);
  std::optional<BudgetShare> reserve(std::size_t comfortable, std::size_t wanted) REQUIRES(mutex_);
  bool drop_unused(Messenger& messenger) REQUIRES(mutex_);
  Growth stop_growing(Nanos at) REQUIRES(mutex_);
  void drop(std::map<std::uint32_t, Chunk>::iterator chunk) REQUIRES(mutex_);

  std::atomic<std::uint64_t> limit_ = 0;
  std::atomic<std::size_t> wanted_ = 0;  // size of a region for which there was no room
  std::atomic<std::size_t> total_ = 0;
  std::atomic<bool> corrupt_ = false;

  Mutex mutex_;
  std::shared_ptr<MemoryBudget> budget_ GUARDED_BY(mutex_);
  ReleaseQueue* releases_ GUARDED_BY(mutex_);  // null after `close`
  std::uint64_t consumed_ GUARDED_BY(mutex_) = 0;
  std::uint64_t outstanding_ GUARDED_BY(mutex_) = 0;  // leases passed on and not returned
  std::map<std::uint32_t, Chunk> chunks_ GUARDED_BY(mutex_);
  std::uint32_t next_ GUARDED_BY(mutex_) = 1;
  std::uint32_t growing_chunk_ GUARDED_BY(mutex_) = 0;  // chunk that is being created or offered
  Nanos no_growth_before_ GUARDED_BY(mutex_) = 0;       // pause after the system or the peer has refused
  FreeRanges free_ GUARDED_BY(mutex_);
  Regions regions_ GUARDED_BY(mutex_);
  std::shared_ptr<MulticastArena> multicast_arena_ GUARDED_BY(mutex_);  // set with the first multicast buffer
  std::map<std::uint32_t, MulticastChunk> multicast_chunks_ GUARDED_BY(mutex_);
  std::set<std::uint64_t> multicast_leases_ GUARDED_BY(mutex_);  // leases of multicast buffers that the receiver has
  bool forked_ GUARDED_BY(mutex_) = false;                       // this is a child: the parent manages the memory
};

}  // namespace telegrad

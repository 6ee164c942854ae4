// The receiver's side of an arena (arena.h): memory of the peer, mapped in this process, with regions for messages.
//
// A region that was passed on belongs to this process alone and is used as mapped, so writing costs nothing extra.
// Multicast memory (multicast_arena.h) is also read by others, so the receiver gets a private view: copy-on-write
// pages. They are dropped before the lease is returned, so that the next tensor in this place does not contain them.
// Pages that were only read stay mapped, so the next tensor causes no page fault. A written page costs ten times its
// share of a copy, so a receiver that writes to its tensors gets copies instead.
//
// A region with no holder except a message that is being sent is returned with it without a copy (zero-copy return).
//
// A forked child must keep its tensors, whatever the parent does with them. So before a fork, the regions in use become
// private as well, including their pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/fork_handlers.h"
#include "base/thread_safety.h"
#include "memory/arena.h"
#include "memory/block.h"
#include "memory/shared_memory.h"

namespace telegrad {

class PeerArena final : public ForkHandler, public std::enable_shared_from_this<PeerArena> {
 public:
  /// `memory` keeps `releases` mapped.
  static std::shared_ptr<PeerArena> make(std::shared_ptr<SharedMemory> memory, ReleaseQueue* releases);
  ~PeerArena() override;

  /// `limit`: bytes of all chunks together at most.
  void set_limit(std::uint64_t limit) { limit_ = limit; }

  /// Maps a chunk that the peer offers. Returns false if it cannot be mapped or exceeds the limit.
  bool map(std::uint32_t number, std::size_t size, UniqueFd file);
  /// Unmaps a chunk that the peer does not use any more.
  void unmap(std::uint32_t number);
  /// Returns the memory of a segment, or null if it is not inside a chunk. Copies it if it cannot be used in place. May
  /// throw std::bad_alloc.
  BlockPtr map_segment(std::uint64_t lease, std::size_t size, BlockSource& blocks);
  /// Returns mapped memory, the whole or a part, to its owner with a message, and returns the lease to send. Returns
  /// 0 if the memory is not of this object or cannot be returned; it must be copied then.
  std::uint64_t return_zero_copy(const OutSegment& segment);

  /// Ends with the link: leases are not returned any more, and no descriptor is kept. Blocks stay valid.
  void close();

  void before_fork() NO_THREAD_SAFETY_ANALYSIS override;
  void after_fork_in_parent() NO_THREAD_SAFETY_ANALYSIS override;
  void after_fork_in_child() NO_THREAD_SAFETY_ANALYSIS override;

 private:
  class MappedRegion;
  struct Chunk {
    SharedMemory memory;  // multicast memory: a private view
  };

  PeerArena(std::shared_ptr<SharedMemory> memory, ReleaseQueue* releases)
      : memory_(std::move(memory)), releases_(releases) {}
  bool should_copy();
  bool drop_private_pages(MappedRegion& region) REQUIRES(mutex_);
  std::size_t count_private_pages(const MappedRegion& region) REQUIRES(mutex_);
  void make_private(MappedRegion& region) REQUIRES(mutex_);
  void release(MappedRegion& region);
  void return_lease(std::uint64_t lease) REQUIRES(mutex_);

  const std::shared_ptr<SharedMemory> memory_;
  ReleaseQueue* const releases_;
  std::uint64_t limit_ = 0;
  std::size_t mapped_ = 0;
  std::map<std::uint32_t, std::shared_ptr<Chunk>> chunks_;  // receiving thread only

  Mutex mutex_;
  std::set<std::pair<const std::byte*, MappedRegion*>> regions_ GUARDED_BY(mutex_);  // by start address
  UniqueFd pagemap_ GUARDED_BY(mutex_);     // of this process, opened on first use
  int copies_left_ GUARDED_BY(mutex_) = 0;  // number of multicast regions to copy
  bool forked_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace telegrad

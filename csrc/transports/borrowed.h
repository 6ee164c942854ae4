// The receiver's side of an arena (arena.h): memory of the peer, mapped in this process, with regions for messages.
//
// A region that was passed on belongs to this process alone and is used as mapped, so writing costs nothing extra.
// Multicast memory (commons.h) is also read by others, so the receiver gets a private view: copy-on-write pages. They
// are dropped before the lease is returned, so that the next tensor in this place does not contain them. Pages that
// were only read stay mapped, so the next tensor causes no page fault. A written page costs ten times its share of a
// copy, so a receiver that writes to its tensors gets copies instead.
//
// A region with no holder except a message that is being sent is returned with it without a copy (zero-copy return).
//
// A forked child must keep its tensors, whatever the parent does with them. So before a fork, the regions in use become
// private as well, including their pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core/forks.h"
#include "core/transport.h"
#include "transports/arena.h"
#include "transports/shared_memory.h"

namespace telegrad {

class Borrower final : public ForkWatcher, public std::enable_shared_from_this<Borrower> {
 public:
  /// `memory` keeps `returns` mapped.
  static std::shared_ptr<Borrower> make(std::shared_ptr<SharedMemory> memory, Returns* returns);
  ~Borrower() override;

  /// `limit`: bytes of all chunks together at most.
  void set_limit(std::uint64_t limit) { limit_ = limit; }

  /// Maps a chunk that the peer offers. Returns false if it cannot be mapped or exceeds the limit.
  bool map(std::uint32_t number, std::size_t size, Descriptor file);
  /// Unmaps a chunk that the peer does not use any more.
  void unmap(std::uint32_t number);
  /// Returns the memory of a segment, or null if it is not inside a chunk. Copies it if it cannot be used in place. May
  /// throw std::bad_alloc.
  BlockPtr borrow(const SegmentHeader& segment, Inbox& inbox);
  /// Returns borrowed memory, the whole or a part, to its owner with a message, and returns the lease to send. Returns
  /// 0 if the memory is not of this object or cannot be returned; it must be copied then.
  std::uint64_t send_home(const OutSegment& segment);

  /// Ends with the link: leases are not returned any more, and no descriptor is kept. Blocks stay valid.
  void close();

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  class Borrowed;
  struct Chunk {
    SharedMemory memory;  // multicast memory: a private view
  };

  Borrower(std::shared_ptr<SharedMemory> memory, Returns* returns) : memory_(std::move(memory)), returns_(returns) {}
  bool is_to_be_copied();
  bool drop_own_pages(Borrowed& region);
  std::size_t count_own_pages(const Borrowed& region);
  void make_private(Borrowed& region);
  void let_go(Borrowed& region);
  void give_back(std::uint64_t lease);

  const std::shared_ptr<SharedMemory> memory_;
  Returns* const returns_;
  std::uint64_t limit_ = 0;
  std::size_t mapped_ = 0;
  std::map<std::uint32_t, std::shared_ptr<Chunk>> chunks_;  // receiving thread only

  std::mutex mutex_;                                          // guards the members below
  std::set<std::pair<const std::byte*, Borrowed*>> regions_;  // by start address
  Descriptor pagemap_;                                        // of this process, opened on first use
  int to_copy_ = 0;                                           // number of multicast regions to copy
  bool forked_ = false;
  bool closed_ = false;
};

}  // namespace telegrad

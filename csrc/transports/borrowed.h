// The receiver's side of an arena (arena.h): memory of the peer's, mapped here, of which regions come with messages.
//
// A region that was handed over is this process's alone and mapped as it is: to write into it costs nothing. Of common
// memory (commons.h), which others have as well, the receiver gets a private view, whose pages are its own from the
// first write on; they are dropped before the lease goes back, so nobody finds them under another tensor later. Pages
// that were only read stay mapped, so that what comes there next is read without a page fault. A page that is written
// to costs ten times its share of a copy, so a receiver that writes to what it gets is given copies.
//
// A region that nobody here holds but a message that leaves goes home with it, as it is.
//
// A forked child must find tensors as they were, whatever becomes of them in the parent. So before a fork, the regions
// that are in use become private as well, pages and all.
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
  /// `memory` holds `returns`.
  static std::shared_ptr<Borrower> make(std::shared_ptr<SharedMemory> memory, Returns* returns);
  ~Borrower() override;

  /// Bytes of all chunks together at most.
  void set_limit(std::uint64_t limit) { limit_ = limit; }

  /// The peer offers a chunk. False: it cannot be mapped, or is not to be.
  bool map(std::uint32_t number, std::size_t size, Descriptor file);
  /// The peer does not use a chunk any more.
  void unmap(std::uint32_t number);
  /// What a segment refers to; null when it is no part of a chunk. Where it cannot be mapped it is copied. May throw
  /// std::bad_alloc.
  BlockPtr borrow(const SegmentHeader& segment, Inbox& inbox);
  /// Something that has been borrowed goes home with a message, the whole or a part: the lease to send. 0 if it is not
  /// of this borrower, or cannot go as it is: then it is to be copied.
  std::uint64_t send_home(const OutSegment& segment);

  /// The link is gone: leases do not go back any more, and no descriptor is kept. Blocks stay as they are.
  void close();

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  class Borrowed;
  struct Chunk {
    SharedMemory memory;  // common memory as a private view
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
  std::map<std::uint32_t, std::shared_ptr<Chunk>> chunks_;  // the receiving thread's

  std::mutex mutex_;                                          // of what is below
  std::set<std::pair<const std::byte*, Borrowed*>> regions_;  // by where they begin
  Descriptor pagemap_;                                        // of this process, once it is needed
  int to_copy_ = 0;                                           // so many common regions
  bool forked_ = false;
  bool closed_ = false;
};

}  // namespace telegrad

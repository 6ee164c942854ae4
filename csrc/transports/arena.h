// Shared memory that one end of a link copies tensors into and the other reads them from. Each direction has an arena:
// its memory belongs to the sender, in chunks that the receiver has mapped as well.
//
// A region of a chunk is handed over by its lease, a number. From then on it is the receiver's, to read and to write,
// until it gives the lease back by putting it into a list in shared memory (Returns), where the sender finds it when it
// next needs room: neither end wakes the other for that. So a tensor is copied once, into memory that has been touched
// before, and its pages are never faulted in or zeroed again.
//
// What the receiver has got it may also send home, as it is: then the region is the sender's program's, like one that
// it has been lent.
//
// A region may also be lent to the program that sends, which writes a tensor there to begin with. Then it is not copied
// at all: it is handed over as it is, and the program must have let go of it. Before a fork such a region becomes the
// process's own, so that parent and child have each their own as they would expect; then it is copied when it is sent.
//
// A chunk is used once the receiver has said that it has mapped it. Until then, and where there is no room, nothing is
// lent, and bytes go through the ring; only what is large waits for a chunk that is on its way. Chunks that nobody has
// used for a while are dropped.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "core/clock.h"
#include "core/forks.h"
#include "core/transport.h"
#include "transports/commons.h"
#include "transports/free_ranges.h"
#include "transports/shared_memory.h"

namespace telegrad {

/// Leases that the receiver gives back, in shared memory; all zero at first.
struct Returns {
  static constexpr std::uint64_t kSlots = 4096;
  alignas(64) std::atomic<std::uint64_t> given;  // so far, by the receiver
  alignas(64) std::atomic<std::uint64_t> taken;  // by the sender
  alignas(64) std::atomic<std::uint64_t> leases[kSlots];
};

/// A lease says where a segment lies: its chunk and how far from its beginning.
struct Lease {
  static constexpr int kOffsetBits = 32;
  // Beside the rest: whoever gets it has lent the memory, which comes home. No chunk has so high a number.
  static constexpr std::uint64_t kHome = std::uint64_t{1} << 62;

  static std::uint64_t of(std::uint32_t chunk, std::size_t offset) {
    return std::uint64_t{chunk} << kOffsetBits | offset / kAlignment;
  }
  static std::uint32_t chunk(std::uint64_t lease) { return static_cast<std::uint32_t>(lease >> kOffsetBits); }
  static std::size_t offset(std::uint64_t lease) {
    return static_cast<std::size_t>(lease & ((std::uint64_t{1} << kOffsetBits) - 1)) * kAlignment;
  }
  /// Is it of memory that others have as well, so that the receiver must not write to it?
  static bool is_common(std::uint64_t lease) { return chunk(lease) >= kCommonChunks; }
  static bool goes_home(std::uint64_t lease) { return (lease & kHome) != 0; }
};

/// The sender's side. Any thread; never blocks for more than a moment.
class Arena final : public ForkWatcher, public std::enable_shared_from_this<Arena> {
 public:
  /// What the peer must be told. False: it cannot be told now, and will be asked again.
  class Messenger {
   public:
    virtual ~Messenger() = default;
    virtual bool offer(std::uint32_t chunk, std::size_t size, int file) = 0;
    virtual bool drop(std::uint32_t chunk) = 0;
  };

  static std::shared_ptr<Arena> make(Returns* returns);
  ~Arena() override;

  /// Bytes of all chunks together at most.
  void set_limit(std::uint64_t limit) { limit_.store(limit, std::memory_order_relaxed); }

  struct Place {
    std::uint64_t lease;
    std::byte* data;
  };
  /// A region for `size` bytes, which the caller holds; nothing when there is no room. Then the arena grows with
  /// `grow`.
  std::optional<Place> place(std::size_t size);
  /// The same as a block, for the program to write to.
  std::optional<Lent> lend(std::size_t size);
  /// The receiver gets a region in the caller's place.
  void hand_over(std::uint64_t lease);
  /// The receiver gets what has been lent, the whole or a part: the lease to send. 0 if this is not of this arena, or
  /// cannot be had as it is: then it is to be copied.
  std::uint64_t give(const OutSegment& segment);
  /// The receiver sends a region home, the whole or a part: it is this program's from now on. Null if the receiver does
  /// not have it. May throw std::bad_alloc.
  BlockPtr come_home(std::uint64_t lease, std::size_t size);

  /// The receiver is told of the chunk that a common piece lies in, unless it has been. True: it has mapped it.
  bool introduce(const Common& piece, Messenger& messenger);
  /// The receiver gets a common piece: the lease to send, or 0.
  std::uint64_t share(const OutSegment& segment, Messenger& messenger);
  /// Takes in what the receiver has given back.
  void collect();

  enum class Growth {
    kNone,     // nothing is wanted, or there will be no room for now: the limit, the machine or the peer does not allow
               // more, or the peer cannot be told
    kGoesOn,   // there is more to do: call it again
    kOffered,  // the peer has a chunk to map; `on_answer` comes
  };
  /// A little work towards a chunk that somebody has found missing.
  Growth grow(Messenger& messenger);
  /// The peer has mapped a chunk that it was offered, or it cannot.
  void on_answer(std::uint32_t chunk, bool mapped);
  /// Drops chunks that have not been used since `before`.
  void trim(Nanos before, Messenger& messenger);
  /// Bytes of all chunks.
  std::size_t size() const { return total_.load(std::memory_order_relaxed); }

  /// The link is gone: nothing comes back any more, nothing is lent, and no descriptor is kept. What the program has
  /// stays as it is; of the memory, what has nothing of that goes at once, and the rest with it.
  void close();
  /// Has the receiver given back what it does not have?
  bool spoiled() const { return spoiled_.load(std::memory_order_relaxed); }

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  class Holder;
  struct Chunk {
    SharedMemory memory;
    std::size_t reserved = 0;
    bool offered = false;
    bool mapped = false;   // by the receiver as well
    std::size_t used = 0;  // bytes
    Nanos idle_since = 0;
  };
  struct Region {
    std::size_t size;  // in whole pages
    int holders;       // on this side: the program, and messages that it has left in
    bool lent;         // to the program
    bool handed_over = false;
    bool is_private = false;  // since a fork, or the end of the link
  };
  using Regions = std::map<std::uint64_t, Region>;  // by lease
  struct CommonChunk {
    bool offered = false;
    bool mapped = false;  // by the receiver
  };

  explicit Arena(Returns* returns) : returns_(returns) {}
  std::optional<Place> place(std::size_t size, bool lent);
  std::optional<Place> find(std::size_t size, bool lent);
  /// Can one more lease come back? Whatever is here may be handed over.
  bool has_slot() const { return regions_.size() + shared_.size() < Returns::kSlots; }
  Regions::iterator region_of(std::uint64_t lease);
  std::byte* data_of(std::uint64_t lease);
  bool take_back();
  bool take_back(std::uint64_t lease);
  bool introduce_locked(const Common& piece, Messenger& messenger);
  bool is_the_programs(const Region& region) const { return region.lent && region.holders > 0 && !region.handed_over; }
  void let_go(std::uint64_t lease);
  void free_if_unused(Regions::iterator region);
  bool begin_chunk(Messenger& messenger);
  Growth give_up_growing(Nanos at);
  void drop(std::map<std::uint32_t, Chunk>::iterator chunk);

  std::atomic<std::uint64_t> limit_ = 0;
  std::atomic<std::size_t> wanted_ = 0;  // a region of this size was missing
  std::atomic<std::size_t> total_ = 0;
  std::atomic<bool> spoiled_ = false;

  std::mutex mutex_;
  Returns* returns_;  // null when closed
  std::uint64_t taken_ = 0;
  std::uint64_t out_ = 0;  // handed over and not given back
  std::map<std::uint32_t, Chunk> chunks_;
  std::uint32_t next_ = 1;
  std::uint32_t growing_ = 0;   // the chunk that is being made or offered
  Nanos no_growth_before_ = 0;  // the machine or the peer has refused
  FreeRanges free_;
  Regions regions_;
  std::shared_ptr<Commons> commons_;  // once something of it was to be shared
  std::map<std::uint32_t, CommonChunk> common_chunks_;
  std::set<std::uint64_t> shared_;  // leases of common pieces that the receiver has
  bool forked_ = false;             // this is a child: what becomes of the memory is the parent's business
};

}  // namespace telegrad

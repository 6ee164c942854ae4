// What is sent to several peers of this host at once lies in shared memory once: whoever gets it maps it and reads it
// there. Nobody writes to it as long as anybody has it. The receivers look at it through private views (borrowed.h), so
// each owns what it has.
//
// A link passes the file of a chunk to its peer before the first piece in it, and hands pieces over once the peer has
// mapped it; until then, and where that cannot be, it sends bytes. It keeps account of what its peer has (arena.h).
// What a peer has not given back when its link ends may still be looked at, by a process that has closed its worker but
// keeps tensors. So that memory is never written to again: the chunk gets no new pieces, and goes with its last one;
// the kernel frees the pages once the last process that has mapped them has let go or died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/clock.h"
#include "transports/free_ranges.h"
#include "transports/shared_memory.h"

namespace telegrad {

class Arena;
class Commons;

/// One thing to send to several peers. Its maker writes it, and then hands it to messages; when the last of these has
/// gone, the memory waits for the receivers alone.
class Common {
 public:
  Common(std::uint64_t lease, std::byte* data, std::size_t size, std::shared_ptr<Commons> commons)
      : lease_(lease), data_(data), size_(size), commons_(std::move(commons)) {}
  ~Common();
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;

  std::uint64_t lease() const { return lease_; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::shared_ptr<Commons>& commons() const { return commons_; }

 private:
  const std::uint64_t lease_;
  std::byte* const data_;
  const std::size_t size_;
  const std::shared_ptr<Commons> commons_;
};

/// Chunks from this number on are of common memory.
inline constexpr std::uint32_t kCommonChunks = std::uint32_t{1} << 31;

/// The common memory of one engine. Thread-safe. Its lock is taken under that of an arena, never the other way round.
class Commons : public std::enable_shared_from_this<Commons> {
 public:
  struct Stats {
    std::size_t pieces = 0;  // that a message or a receiver has
    std::size_t bytes = 0;   // of all chunks
  };

  /// `limit`: bytes of all chunks together at most.
  explicit Commons(std::uint64_t limit) : limit_(limit) {}

  /// Memory for `size` bytes; null when there is none. Reserves it if need be, which takes as long as filling it.
  std::shared_ptr<Common> put(std::size_t size);
  /// Gives up chunks that have not been used since `before`.
  void trim(Nanos before);
  Stats stats();
  /// Bytes of all chunks.
  std::size_t size() const { return total_.load(std::memory_order_relaxed); }

  // ---- for arenas

  /// Its peer may get pieces: it is asked for what has come back when room is needed.
  void join(const std::weak_ptr<Arena>& arena);
  struct Offer {
    std::size_t size;
    int file;  // of the chunk, as long as there is a piece in it
  };
  Offer offer(std::uint32_t chunk);
  bool has(std::uint32_t chunk);
  /// A receiver gets a piece that has a holder.
  void hold(std::uint64_t lease);
  void let_go(std::uint64_t lease);
  /// A receiver will not say any more whether it has the piece.
  void give_up(std::uint64_t lease);

 private:
  struct Chunk {
    SharedMemory memory;
    std::size_t pieces = 0;
    Nanos idle_since = 0;
    bool given_up = false;
  };
  struct Piece {
    std::size_t size;
    std::size_t holders;
  };
  using Chunks = std::map<std::uint32_t, Chunk>;

  void collect();
  std::shared_ptr<Common> take(std::size_t size);
  std::size_t room_for(std::size_t size);
  void drop(Chunks::iterator chunk);

  const std::uint64_t limit_;
  std::vector<std::weak_ptr<Arena>> arenas_;
  Chunks chunks_;
  std::uint32_t next_ = kCommonChunks;
  std::atomic<std::size_t> total_ = 0;
  Nanos no_growth_before_ = 0;
  FreeRanges free_;
  std::map<std::uint64_t, Piece> pieces_;  // by lease
};

}  // namespace telegrad

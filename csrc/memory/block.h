// Blocks of memory: received segments, leases, and segments to send.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

/// Source of blocks for received data.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// Returns memory for `size` bytes. May throw std::bad_alloc: then the link discards the content of a request or
  /// reply that may be discarded (core/left_out.h), and breaks at any other message.
  virtual BlockPtr allocate(std::size_t size) = 0;
  /// Returns the block to deliver for memory that the peer has leased. May throw std::bad_alloc.
  virtual BlockPtr adopt(BlockPtr leased) { return leased; }
};

/// Leased memory of a link.
struct LinkLease {
  std::uint64_t lease;  // not 0, unique to the link; OutSegment::lease names it
  BlockPtr memory;      // written only before the message that names it is sent; 64-byte aligned
};

class MulticastBuffer;  // see memory/multicast_arena.h

/// Part of a message to send, outside its body.
struct OutSegment {
  const std::byte* data;
  std::uint64_t size;
  // 0, or the lease of the memory (`Link::lease`), which has no other holder. The link passes the memory on instead of
  // its bytes. A link that does not know the lease sends the bytes.
  std::uint64_t lease = 0;
  const MulticastBuffer* multicast = nullptr;  // the multicast buffer that it fills, owned by the message
};

}  // namespace telegrad

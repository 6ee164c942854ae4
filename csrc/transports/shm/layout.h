// Layout shared by the two ends of a shared-memory link: the memory of the link, and the packets of its socket.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memory/arena.h"
#include "memory/shared_memory.h"
#include "transports/shm/ring.h"

namespace telegrad {

/// "4TGS": version number, changed with the layout below and with the meaning of leases.
inline constexpr std::uint32_t kShmLayout = 0x53475434;

/// Start of the memory, followed by the bytes of the two rings.
struct ShmControl {
  std::atomic<std::uint32_t> closed;  // by either end; data in the rings is still to be read
  RingControl rings[2];               // 0: written by the connecting end
  ReleaseQueue releases[2];           // 0: leases of the connecting end's arena
};

inline constexpr std::size_t kShmRing = 256 << 10;
inline constexpr std::size_t kShmRings = (sizeof(ShmControl) + kPage - 1) / kPage * kPage;  // offset of the rings
inline constexpr std::size_t kShmSize = kShmRings + 2 * kShmRing;

/// Packet of the socket; single bytes only wake the receiver.
struct ShmPacket {
  enum What : std::uint32_t {
    kMemory = 1,   // the link's memory is attached: `number` is kShmLayout
    kOffer = 2,    // a chunk of the sender's arena is attached: `number` is the chunk's
    kMapped = 3,   // an offered chunk has been mapped
    kRefused = 4,  // an offered chunk has not been mapped
    kDrop = 5,     // a chunk is not used any more
  };
  std::uint32_t what;
  std::uint32_t number;
  std::uint64_t size;
};

}  // namespace telegrad

// What the two ends of a shared-memory link agree upon: the memory of the link, and the packets of its socket.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transports/arena.h"
#include "transports/ring.h"
#include "transports/shared_memory.h"

namespace telegrad {

/// "3TGS": changes with anything below, and with what leases say.
inline constexpr std::uint32_t kShmLayout = 0x53475433;

/// At the beginning of the memory; then come the bytes of the two rings.
struct ShmControl {
  std::atomic<std::uint32_t> closed;  // by either end; what is in the rings then is still to be read
  RingControl rings[2];               // 0: from the connecting end
  Returns returns[2];                 // 0: of what that end has lent
};

inline constexpr std::size_t kShmRing = 256 << 10;
inline constexpr std::size_t kShmRings = (sizeof(ShmControl) + kPage - 1) / kPage * kPage;  // where they begin
inline constexpr std::size_t kShmSize = kShmRings + 2 * kShmRing;

/// What passes over the socket, beside single bytes that only wake.
struct ShmPacket {
  enum What : std::uint32_t {
    kMemory = 1,   // the link's memory is passed along: `number` is kShmLayout
    kOffer = 2,    // a chunk of the sender's arena is passed along: `number` is its own
    kMapped = 3,   // it has been mapped,
    kRefused = 4,  // or not
    kDrop = 5,     // it is not used any more
  };
  std::uint32_t what;
  std::uint32_t number;
  std::uint64_t size;
};

}  // namespace telegrad

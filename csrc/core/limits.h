// What one frame may be at most. Workers exchange their limits in the handshake: a sender keeps to its receiver's.
#pragma once

#include <cstdint>

namespace telegrad {

/// Checked by the receiver before anything is allocated: a peer that goes beyond them is cut off.
struct Limits {
  std::uint64_t body = std::uint64_t{1} << 30;
  std::uint64_t message = std::uint64_t{1} << 36;  // all segments together, without the trailer
  std::uint32_t segments = 1 << 20;
  std::uint32_t name = 1 << 16;
  // Of the trailer: the same on all workers, and not exchanged.
  std::uint64_t trailer = 16 << 20;
  // Not of a frame: bytes of memory that a link lends its sender, and that it maps of its peer's, at most. Only links
  // through shared memory have such.
  std::uint64_t lent = std::uint64_t{1} << 30;
};

/// Every worker takes messages up to this size, name, body and segments together, and none discards them for want of
/// memory: what workers say to each other about references and shutdown is smaller.
inline constexpr std::uint64_t kAlwaysTaken = 64 << 10;

/// Limits while the peer is a stranger: one small handshake frame at a time.
inline constexpr Limits kStrangerLimits{.body = 4096, .message = 0, .segments = 0, .name = 0, .trailer = 0, .lent = 0};

}  // namespace telegrad

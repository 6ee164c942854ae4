// Limits of one frame. Workers exchange them in the handshake, and senders observe those of the receiver.
#pragma once

#include <cstdint>

namespace telegrad {

/// Checked by the receiver before any allocation. A peer that exceeds them is disconnected.
struct Limits {
  std::uint64_t body = std::uint64_t{1} << 30;
  std::uint64_t message = std::uint64_t{1} << 36;  // all segments together, without the trailer
  std::uint32_t segments = 1 << 20;
  std::uint32_t name = 1 << 16;
  // Of the trailer: the same on all workers, not exchanged.
  std::uint64_t trailer = 16 << 20;
  // Of the link, not of a frame: bytes of memory that it leases to its sender, and that it maps from its peer. Used by
  // shared-memory links only.
  std::uint64_t leased = std::uint64_t{1} << 30;
};

/// Every worker accepts messages up to this size (name, body and segments) and never discards them for lack of memory.
/// Messages of the reference and shutdown protocols are smaller.
inline constexpr std::uint64_t kAlwaysTaken = 64 << 10;

/// Limits before the peer is authenticated: one small handshake frame at a time.
inline constexpr Limits kHandshakeLimits{
    .body = 4096, .message = 0, .segments = 0, .name = 0, .trailer = 0, .leased = 0};

}  // namespace telegrad

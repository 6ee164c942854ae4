// Limits of one frame, and of what a worker keeps at once. Workers exchange `Limits` in the handshake, and senders
// observe those of the receiver.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/constants.h"

namespace telegrad {

/// Checked by the receiver before any allocation. A peer that exceeds them is disconnected.
struct Limits {
  std::uint64_t body = std::uint64_t{1} << 30;
  std::uint64_t message = std::uint64_t{1} << 36;  // all segments together, without the trailer
  std::uint32_t segments = 1 << 20;
  std::uint32_t name = 1 << 16;
  // Of the connection: requests without a reply.
  std::uint32_t requests = 1 << 16;
  // And the bytes of large ones among them, see core/request_bytes.h.
  std::uint64_t request_bytes = std::uint64_t{16} << 30;
  // Of the trailer: the same on all workers, not exchanged.
  std::uint64_t trailer = wire::kMaxMetadata;
  // Of the link, not of a frame: bytes of memory that it leases to its sender, and that it maps from its peer. Used by
  // shared-memory links only.
  std::uint64_t leased = std::uint64_t{1} << 30;
};

/// Limits of what one worker keeps at once, see core/overload.h. Not exchanged.
struct LoadLimits {
  std::uint32_t call_depth = 64;                        // of nested calls
  std::uint64_t send_queue = std::uint64_t{1} << 30;    // bytes that wait to be sent to one peer
  std::uint64_t waiting_messages = 1 << 16;             // to one peer without a connection
  std::uint64_t arena_budget = std::uint64_t{4} << 30;  // bytes of arenas and cached receive memory
  std::uint64_t peers = 1 << 14;
  std::uint64_t unauthenticated = 64;  // accepted connections before their handshake has ended
};

/// Sums of bytes stay far below this, which two of them may add up to.
inline constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;

/// Names that a peer may define on one connection, and their bytes. A sender with more sends the text of further names
/// with each message, under the id kTransientName.
inline constexpr std::uint32_t kMaxNames = 1 << 16;
inline constexpr std::uint64_t kMaxNameBytes = 16 << 20;
inline constexpr std::uint32_t kTransientName = kMaxNames + 1;

/// Bytes of copies for which a resumable link has no acknowledgement; the next message waits beyond this.
inline constexpr std::size_t kMaxUnacknowledged = 4 << 20;

/// Every worker accepts messages up to this size (name, body and segments) and never discards them for lack of memory.
/// Messages of the reference and shutdown protocols are smaller.
inline constexpr std::uint64_t kAlwaysTaken = wire::kAlwaysTaken;

/// Limits before the peer is authenticated: one small handshake frame at a time.
inline constexpr Limits kHandshakeLimits{
    .body = 4096, .message = 0, .segments = 0, .name = 0, .requests = 0, .request_bytes = 0, .trailer = 0, .leased = 0};

}  // namespace telegrad

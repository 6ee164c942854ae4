// Fragments: large messages in parts, between which a link sends others.
//
// The large segments of a fragmented message are not in its frame. Their headers have the lease kFragmented, and their
// bytes follow as fragments, frames of type kFragment, over any connection of the link. One message is fragmented at a
// time. Both ends count these messages, which gives their numbers:
//     FrameHeader   type kFragment, call_id: number of the message, timeout: offset of its bytes in the fragmented
//                   segments, concatenated
//     SegmentHeader the size, lease 0
// The receiver reads a fragment directly into its place (reassembler.h). Meanwhile it delivers other messages, as far
// as the order rules allow (core/delivery_order.h).
#pragma once

#include <cstdint>

#include "core/message.h"

namespace telegrad {

inline constexpr std::uint64_t kMaxFragment = 512 << 10;

/// Sizes from which messages are fragmented.
struct FragmentSizes {
  std::uint64_t message = 1 << 20;   // bytes of such segments: sending them takes longer than a small call
  std::uint64_t segment = 64 << 10;  // least size of such a segment: a smaller one is in the frame
  std::uint64_t fragment = kMaxFragment;
};

/// Returns the bytes of a message in segments that may be fragmented; 0 if it is not large.
std::uint64_t large_bytes(const Outgoing& message, const FragmentSizes& sizes);

/// A fragment that is being sent.
struct Fragment {
  Outgoing out;
  bool busy = false;
  std::size_t segment = 0;   // index in the message
  std::uint64_t offset = 0;  // in that segment

  /// Finds the bytes again: they may have been copied meanwhile.
  void locate(const Outgoing& message) { out.segments[0].data = message.segments[segment].data + offset; }
};

/// Cuts messages into fragments, one after the other. Sending thread only.
class Fragmenter {
 public:
  explicit Fragmenter(std::uint64_t size) : size_(size) {}

  /// Begins a message, whose fragmented segments have the lease kFragmented.
  void begin() {
    segment_ = 0;
    offset_ = place_ = 0;
  }
  /// Returns the next fragment of the message. False if there is none left.
  bool cut(const Outgoing& message, Fragment& fragment);
  /// Ends a message: all of its fragments have been sent.
  void end() { ++number_; }

 private:
  const std::uint64_t size_;
  std::uint64_t number_ = 0;  // of the message
  std::size_t segment_ = 0;   // where the next fragment begins
  std::uint64_t offset_ = 0, place_ = 0;
};

}  // namespace telegrad

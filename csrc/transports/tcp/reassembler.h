// Reassembly of fragmented messages: see laned_link.h. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "transports/frames.h"

namespace telegrad {

/// Lease of a segment that arrives as fragments.
inline constexpr std::uint64_t kFragmented = 1;
inline constexpr std::uint64_t kMaxFragment = 512 << 10;
/// Limit for the missing bytes of messages with complete frames, without those of the largest message. A sender begins
/// the next message once the kernel has accepted the fragments of the last one, on all lanes.
inline constexpr std::uint64_t kMaxMissing = 512 << 20;

class Reassembler final : public SegmentSource {
 public:
  void set_limits(const Limits& limits) { limits_ = limits; }

  /// Returns the place of a segment or fragment. Null if there is none, or if more bytes than allowed would be missing.
  BlockPtr map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override;
  void discard(const Block* trailer) override;

  /// Accepts a frame: a message or a fragment. Returns false if a fragment does not fit.
  bool accept(Incoming&& frame);

  /// Delivers complete messages, in order.
  void deliver(Inbox& inbox);

  /// Returns whether a message is incomplete.
  bool waits() const { return missing_ > 0 || !messages_.empty() || has_early(); }

  /// Returns whether there are fragments that arrived before the frame of their message. The lane that delivered such a
  /// fragment is not read until there are none.
  bool has_early() const { return early_until_ > next_; }

  /// Returns whether the frame of a fragmented message is being read.
  bool begun() const { return current_ != nullptr; }

 private:
  struct Part {
    std::byte* data;  // null: its bytes are discarded
    std::uint64_t size;
  };
  struct Pending {
    Incoming message;
    std::uint64_t number = kWhole;
    std::vector<Part> parts;      // its fragmented segments
    std::uint64_t missing = 0;    // bytes that have not arrived
    std::uint64_t unclaimed = 0;  // bytes of fragments that have not begun
    bool incomplete = false;      // there was no memory for an early fragment
  };
  struct EarlyFragment {
    std::uint64_t number, place;
    BlockPtr block;
  };

  BlockPtr map_fragment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox);
  Pending* find(std::uint64_t number);
  static std::optional<std::byte*> locate(Pending& message, std::uint64_t place, std::uint64_t size);
  static bool may_be_discarded(const Pending& message);
  bool complete_fragment(std::uint64_t number, std::uint64_t place, const Block& block);

  static constexpr std::uint64_t kWhole = UINT64_MAX;  // number of a message that is not fragmented

  Limits limits_;
  std::deque<std::unique_ptr<Pending>> messages_;  // with complete frames, in order
  std::unique_ptr<Pending> current_;               // frame being read
  std::uint64_t next_ = 0;                         // number of the next fragmented message
  std::uint64_t missing_ = 0;                      // bytes of all messages that have not arrived
  std::uint64_t early_until_ = 0;                  // fragments of messages below this number have been seen
  std::vector<EarlyFragment> early_;               // complete fragments of messages without a frame so far
  std::uint64_t early_bytes_ = 0;                  // their bytes on the wire
};

}  // namespace telegrad

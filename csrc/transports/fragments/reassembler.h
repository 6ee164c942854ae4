// Reassembly of fragmented messages, and delivery by the order rules. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "core/delivery_order.h"
#include "transports/fragments/fragments.h"
#include "transports/frames.h"

namespace telegrad {

/// Limit for the missing bytes of messages with complete frames, without those of the largest message. A sender begins
/// the next message once the kernel has accepted the fragments of the last one, on all lanes.
inline constexpr std::uint64_t kMaxMissing = 512 << 20;
/// Limit for incomplete messages. A sender has given all but the last of them to the kernel, whose buffers are smaller
/// than this many messages of 1 MiB. Over one connection there is never more than one.
inline constexpr std::size_t kMaxIncomplete = 1024;
/// Limits for complete messages that wait for an incomplete one. A sender keeps these back itself (Sender), so only a
/// few arrive while the last fragments are on their way.
inline constexpr std::size_t kMaxHeld = 4096;
inline constexpr std::uint64_t kMaxHeldBytes = 64 << 20;

class Reassembler final : public SegmentSource {
 public:
  void set_limits(const Limits& limits) { limits_ = limits; }

  /// Returns the place of a segment or fragment. Null if there is none, or if more bytes than allowed would be missing.
  BlockPtr map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override;
  void discard(const Block* trailer) override;

  /// Accepts a frame: a message or a fragment. Returns false if a fragment does not fit, or too many messages wait.
  bool accept(Incoming&& frame);

  /// Delivers the complete messages that the order rules allow.
  void deliver(Inbox& inbox) {
    if (!messages_.empty()) [[unlikely]]
      deliver_complete(inbox);
  }

  /// Returns whether a frame needs no reassembly and no order, because no message is incomplete.
  bool passes(const Incoming& frame) const { return frame.header.type != FrameType::kFragment && !begun() && !waits(); }

  /// Returns whether a message is incomplete.
  bool waits() const { return missing_ > 0 || !messages_.empty() || has_early(); }

  /// Returns whether there are fragments that arrived before the frame of their message. The lane that delivered such a
  /// fragment is not read until there are none.
  bool has_early() const { return early_until_ > next_; }

  /// Returns whether the frame of a fragmented message is being read.
  bool begun() const { return current_ != nullptr; }

 private:
  struct Part {
    std::byte* data;      // null: its bytes are discarded
    std::uint64_t begin;  // offset within the fragmented bytes of the message
    std::uint64_t size;
    std::uint64_t end() const { return begin + size; }
  };
  struct Pending {
    Incoming message;
    std::uint64_t number = kWhole;
    std::vector<Part> parts;      // its fragmented segments
    std::uint64_t missing = 0;    // bytes that have not arrived
    std::uint64_t unclaimed = 0;  // bytes of fragments that have not begun
    std::uint64_t memory = 0;     // with those that have not arrived
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
  static std::uint64_t memory_of(const Incoming& message);
  bool is_within_limits() const;
  void deliver_complete(Inbox& inbox);
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
  std::size_t incomplete_ = 0;                     // messages with complete frames and missing bytes
  std::size_t held_ = 0;                           // complete messages that wait for others,
  std::uint64_t held_bytes_ = 0;                   // and their memory, if they are not large
  std::uint64_t held_large_ = 0;                   // memory of large messages but for the first
};

/// Source of the segments on a lane: fragments only. The frames of their messages come over the first connection, one
/// at a time.
class FragmentSource final : public SegmentSource {
 public:
  explicit FragmentSource(Reassembler& reassembler) : reassembler_(reassembler) {}
  BlockPtr map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override {
    return frame.type == FrameType::kFragment ? reassembler_.map_segment(frame, segment, inbox) : nullptr;
  }

 private:
  Reassembler& reassembler_;
};

/// Inbox of a link with one connection: passes frames through a reassembler.
class ReassemblingInbox final : public Inbox {
 public:
  ReassemblingInbox(Reassembler& reassembler, Inbox& inbox) : reassembler_(reassembler), inbox_(inbox) {}
  BlockPtr allocate(std::size_t size) override { return inbox_.allocate(size); }
  BlockPtr adopt(BlockPtr lent) override { return inbox_.adopt(std::move(lent)); }
  void deliver(Incoming&& message) override;
  /// Returns false if a frame has been refused.
  bool good() const { return good_; }

 private:
  Reassembler& reassembler_;
  Inbox& inbox_;
  bool good_ = true;
};

inline constexpr char kEndedInMessage[] = "the connection ended in the middle of a message";
inline constexpr char kBadFragments[] = "received fragments of a message that do not fit together";

}  // namespace telegrad

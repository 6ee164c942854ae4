// Messages that arrive in pieces, put together: see lanes.h. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "transports/frames.h"

namespace telegrad {

/// As a segment's lease: its bytes come in pieces.
inline constexpr std::uint64_t kScattered = 1;
inline constexpr std::uint64_t kLargestPiece = 512 << 10;
/// Bytes of messages whose frames have come and whose pieces have not, at most, besides those of the largest message: a
/// sender begins the next message once the system has the pieces of the last one, on all lanes.
inline constexpr std::uint64_t kUnderWay = 512 << 20;

class Scattered final : public Leases {
 public:
  void set_limits(const Limits& limits) { limits_ = limits; }

  /// The place of a segment or of a piece. Null: there is no such, or more than the limits allow would be under way.
  BlockPtr borrow(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override;
  void discard(const Block* trailer) override;

  /// A frame has been read: a message, or a piece. False: it does not belong here.
  bool take(Incoming&& frame);

  /// Delivers what is whole, in order.
  void deliver(Inbox& inbox);

  /// Is any of a message missing?
  bool waits() const { return missing_ > 0 || !messages_.empty() || has_early(); }

  /// Pieces that have come before the frame of their message. Who reads a lane that brings such stops, until there are
  /// none.
  bool has_early() const { return early_until_ > next_; }

  /// Is the frame of a scattered message being read?
  bool begun() const { return beginning_ != nullptr; }

 private:
  struct Part {
    std::byte* data;  // null: its bytes are discarded
    std::uint64_t size;
  };
  struct Pending {
    Incoming message;
    std::uint64_t number = kWhole;
    std::vector<Part> parts;    // its scattered segments
    std::uint64_t missing = 0;  // bytes of them that are not there yet,
    std::uint64_t unasked = 0;  // and that are in no piece that has begun
    bool has_gap = false;       // there was no memory for a piece that was early
  };
  struct Early {
    std::uint64_t number, place;
    BlockPtr block;
  };

  BlockPtr place_of_piece(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox);
  Pending* find(std::uint64_t number);
  static std::optional<std::byte*> locate(Pending& message, std::uint64_t place, std::uint64_t size);
  static bool may_be_discarded(const Pending& message);
  bool arrived(std::uint64_t number, std::uint64_t place, const Block& block);

  static constexpr std::uint64_t kWhole = UINT64_MAX;  // as a number: it came in one piece

  Limits limits_;
  std::deque<std::unique_ptr<Pending>> messages_;  // whose frames have come, in order
  std::unique_ptr<Pending> beginning_;             // whose frame is being read
  std::uint64_t next_ = 0;                         // the number of the next scattered one
  std::uint64_t missing_ = 0;                      // bytes, of all of them
  std::uint64_t early_until_ = 0;                  // numbers below it have been seen
  std::vector<Early> early_;                       // pieces that are whole, and whose message has not begun,
  std::uint64_t early_bytes_ = 0;                  // and their bytes on the wire
};

}  // namespace telegrad

// Frames as bytes: how messages are written to any ordered stream of bytes, and read from it. See core/message.h for
// the format. A segment with a lease lies in memory that the transport shares: only its header is in the frame.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/transport.h"

namespace telegrad {

inline constexpr std::size_t kFlatFrame = 1024;      // a frame up to here is copied together and sent as one piece
inline constexpr std::size_t kHeldFrames = 8 << 10;  // bytes of such frames that wait for others to leave with

// ---- writing

/// Fills in what the header says of the rest.
void complete(FrameHeader& header, const Outgoing& message);

/// Bytes of the whole frame.
std::uint64_t frame_size(const Outgoing& message);

/// Writes the whole frame, with this header, in one piece; returns its size.
std::size_t flatten(const Outgoing& message, const FrameHeader& header, std::byte* out);

/// The same after its prefix: body and segments.
std::uint64_t payload_in_frame(const Outgoing& message);

/// Begins a frame that goes piece by piece: completes its header, fills `prefix` and `total`.
void begin(Outgoing& message);

/// The pieces of a frame that has been begun, after its first `sent` bytes: `count` of them, and `most` bytes, at most.
int gather(Outgoing& message, iovec* out, int count, std::uint64_t most);

// ---- reading

/// Memory that a frame refers to.
class Leases {
 public:
  virtual ~Leases() = default;
  /// The memory of a segment that is not in the frame, or of a piece; null when there is none such. A `Discarded` block
  /// where there is no memory for bytes that come; where there is none for anything else, this throws std::bad_alloc.
  virtual BlockPtr borrow(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) = 0;
  /// The frame being read is discarded: but for `trailer`, which may be null, the blocks borrowed for it are gone.
  virtual void discard([[maybe_unused]] const Block* trailer) {}
};

/// Stands for bytes that are read and discarded: there is no memory behind it.
class Discarded final : public Block {
 public:
  explicit Discarded(std::size_t size) : Block(nullptr, size) {}
};

/// Takes a stream apart into messages. A request or reply for which there is no memory is read and discarded, but for
/// its trailer, and delivered without its content (Incoming::discarded). One thread at a time.
class FrameReader {
 public:
  /// `leases`: null where there are none.
  explicit FrameReader(Leases* leases = nullptr) : leases_(leases) {}

  /// Also from inside `Inbox::deliver`.
  void set_leases(Leases* leases) { leases_ = leases; }

  /// What a frame may be from now on. Also from inside `Inbox::deliver`.
  void set_limits(const Limits& limits) { limits_ = limits; }

  /// Takes in the next bytes of the stream and delivers what becomes whole. False: they are no frame, or one beyond the
  /// limits; `error()` says so, and nothing more can be read. Throws std::bad_alloc when there is no memory for what
  /// cannot be discarded.
  bool read(const std::byte* data, std::size_t size, Inbox& inbox);
  const std::string& error() const { return error_; }

  /// Where the next bytes of the stream may be put straight, and how many of them; 0 where too few are missing for it
  /// to pay. `placed` says how many have been put there; `read` must follow, if need be of nothing.
  std::size_t direct_target(std::byte** to) const;
  void placed(std::size_t count) { filled_ += count; }

  /// Is the stream between two frames?
  bool at_rest() const { return step_ == Step::kHeader && filled_ == 0; }

  /// The frame being read, for an error.
  std::string describe() const;

 private:
  enum class Step { kHeader, kSegmentHeaders, kName, kBody, kSegments };

  bool parse(Inbox& inbox);
  bool begin_frame();
  bool begin_segments(Inbox& inbox);
  bool check_sizes();
  bool take_memory(Inbox& inbox);
  void discard_content(Inbox& inbox, std::uint64_t size);
  void deliver(Inbox& inbox);
  bool fill(void* to, std::size_t size);
  bool has_trailer() const { return incoming_.header.flags & kTrailer && !segment_headers_.empty(); }
  void fail(std::string why) { error_ = std::move(why); }

  Leases* leases_;
  Limits limits_;
  std::string error_;

  // Bytes not yet understood.
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;

  // The frame being read.
  Step step_ = Step::kHeader;
  std::size_t filled_ = 0;  // bytes of the current part that are there
  Incoming incoming_;
  SegmentHeader segment_header_;
  std::vector<SegmentHeader> segment_headers_;
  std::size_t segment_ = 0;      // the segment being filled
  std::uint64_t discarded_ = 0;  // its bytes, if there is no memory for it
};

/// Small frames that wait for others to leave with.
class HeldFrames {
 public:
  /// Takes a copy. False: the message is too large or brings lent memory, or enough is held already.
  bool take(const Outgoing& message);

  bool empty() const { return begin_ == end_; }
  const std::byte* data() const { return bytes_.get() + begin_; }
  std::size_t size() const { return end_ - begin_; }
  /// So many of the bytes have left.
  void left(std::size_t count);

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace telegrad

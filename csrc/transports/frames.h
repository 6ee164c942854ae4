// Frames as bytes: messages written to, and read from, any ordered byte stream. See core/message.h for the format. A
// segment with a lease resides in memory that the transport shares: the frame has only its header.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/transport.h"

namespace telegrad {

inline constexpr std::size_t kFlatFrame = 1024;           // frames up to this size are copied and sent in one piece
inline constexpr std::size_t kFrameBufferSize = 8 << 10;  // buffer size for such frames when they are coalesced

// ---- writing

/// Sets the sizes and counts in the header of a message.
void fill_header(FrameHeader& header, const Outgoing& message);

/// Returns the size of the whole frame.
std::uint64_t frame_size(const Outgoing& message);

/// Writes the whole frame with this header into contiguous memory; returns its size.
std::size_t flatten(const Outgoing& message, const FrameHeader& header, std::byte* out);

/// Writes the body and the segments, which follow the prefix.
std::uint64_t payload_in_frame(const Outgoing& message);

/// Begins a frame that is sent in parts: completes its header, sets `prefix` and `total`. Makes an allocation only for
/// segments or a name.
void start_frame(Outgoing& message);

/// Lists the parts of a begun frame after its first `sent` bytes: at most `count` parts and `most` bytes.
int fill_iovecs(Outgoing& message, iovec* out, int count, std::uint64_t most);

// ---- reading

/// Source of segments outside the frame.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  /// Returns the memory of a segment with a lease, or of a fragment; null if it is unknown. Returns a `Discarded` block
  /// if there is no memory for received bytes; throws std::bad_alloc if there is none for anything else.
  virtual BlockPtr map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) = 0;
  /// Reports that the current frame is discarded: blocks mapped for it are destroyed, except `trailer` (may be null).
  virtual void discard([[maybe_unused]] const Block* trailer) {}
};

/// Placeholder for bytes that are read and discarded: it has no memory.
class Discarded final : public Block {
 public:
  explicit Discarded(std::size_t size) : Block(nullptr, size) {}
};

/// Parser of a byte stream into messages. Reads and discards a request or reply for which there is no memory, except
/// its trailer, and delivers it without its content (Incoming::discarded). One thread at a time.
class FrameReader {
 public:
  /// `source`: null if the transport has none.
  explicit FrameReader(SegmentSource* source = nullptr) : source_(source) {}

  /// May be called inside `Inbox::deliver`.
  void set_segment_source(SegmentSource* source) { source_ = source; }

  /// Sets the limits of frames. May be called inside `Inbox::deliver`.
  void set_limits(const Limits& limits) { limits_ = limits; }

  /// Parses the next bytes of the stream and delivers complete messages. Returns false if the bytes are malformed or
  /// over the limits; `error()` has the reason, and the reader stays failed. Throws std::bad_alloc if there is no
  /// memory for content that cannot be discarded.
  bool read(const std::byte* data, std::size_t size, Inbox& inbox);
  const std::string& error() const { return error_; }

  /// Returns how many of the next bytes may be read directly to `*to`, or 0 if too few are missing for this to pay.
  /// `placed` reports the bytes that were read there; `read` must follow, with no bytes if there are no others.
  std::size_t direct_target(std::byte** to) const;
  void placed(std::size_t count) { filled_ += count; }

  /// Returns how many bytes after those should be read with them: of a fragment only the headers of the next one, whose
  /// bytes are then read directly too.
  std::size_t read_ahead(std::size_t buffer) const {
    return incoming_.header.type == FrameType::kFragment ? sizeof(FrameHeader) + sizeof(SegmentHeader) : buffer;
  }

  /// Returns what is wrong if the stream ends now; "" between two frames.
  std::string end() const;

  /// Describes the current frame for an error text.
  std::string describe() const;

 private:
  enum class Step { kHeader, kSegmentHeaders, kName, kBody, kSegments };

  bool parse(Inbox& inbox);
  bool begin_frame();
  bool begin_segments(Inbox& inbox);
  bool check_sizes();
  bool allocate_frame(Inbox& inbox);
  void discard_content(Inbox& inbox, std::uint64_t size);
  void deliver(Inbox& inbox);
  bool fill(void* to, std::size_t size);
  bool has_trailer() const { return incoming_.header.flags & kTrailer && !segment_headers_.empty(); }
  void fail(std::string why) { error_ = std::move(why); }

  SegmentSource* source_;
  Limits limits_;
  std::string error_;
  std::uint64_t numbered_ = 0;  // frames with a number so far

  // Bytes not parsed yet.
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;

  // The current frame.
  Step step_ = Step::kHeader;
  std::size_t filled_ = 0;  // bytes of the current part that have been read
  Incoming incoming_;
  SegmentHeader segment_header_;
  std::vector<SegmentHeader> segment_headers_;
  std::size_t segment_ = 0;      // the segment being filled
  std::uint64_t discarded_ = 0;  // size of the frame if there is no memory for it
};

/// Buffer of small coalesced frames.
class FrameBuffer {
 public:
  /// Appends a copy. Returns false if the message is too large or has leased memory, or the buffer is full.
  bool append(const Outgoing& message);

  bool empty() const { return begin_ == end_; }
  const std::byte* data() const { return bytes_.get() + begin_; }
  std::size_t size() const { return end_ - begin_; }
  /// Removes bytes that have been sent.
  void consume(std::size_t count);

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace telegrad

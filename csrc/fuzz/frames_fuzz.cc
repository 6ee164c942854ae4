// Bytes of a stream, in pieces of any size, into the parser of frames.
//
// Input: flags, size of the pieces, size from which there is no memory, then the stream. A delivered message with all
// of its bytes must encode to the bytes from which it was read.
#include <string>

#include "fuzz/inbox.h"
#include "fuzz/input.h"
#include "transports/frames.h"

namespace telegrad::fuzz {
namespace {

enum Flags : std::uint8_t { kHandshake = 1, kNarrow = 2, kDirect = 4 };

Limits limits_of(std::uint8_t flags) {
  if (flags & kHandshake) return kHandshakeLimits;
  if (flags & kNarrow) return {.body = 256, .message = 512, .segments = 4, .name = 16, .trailer = 64};
  return {};
}

/// Encodes a received message.
std::string encode(const Incoming& message) {
  Outgoing out;
  out.header = message.header;
  out.name = message.name_view();
  out.body = message.body_view();
  for (const BlockPtr& s : message.segments) out.segments.push_back({s->data(), s->size()});
  std::string bytes(frame_size(out), '\0');
  flatten(out, out.header, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

void check(const Incoming& message, const Limits& limits, std::string_view& stream, bool& whole) {
  require(message.name_view().size() <= limits.name, "a name is within the limits");
  require(message.body_view().size() <= limits.body, "a body is within the limits");
  require(message.segments.size() <= limits.segments, "the number of segments is within the limits");
  whole = whole && message.discarded == 0;
  if (!whole) return;
  const std::string bytes = encode(message);
  require(stream.starts_with(bytes), "a message encodes to the bytes of its frame");
  stream.remove_prefix(bytes.size());
}

/// Reads like a link: large parts directly into their memory. Returns false if the stream is malformed.
bool read(FrameReader& reader, std::string_view piece, bool direct, SmallInbox& inbox) {
  std::byte* to = nullptr;
  const std::size_t room = direct ? reader.direct_target(&to) : 0;
  const std::size_t placed = std::min(room, piece.size());
  if (placed > 0) {
    std::memcpy(to, piece.data(), placed);
    reader.placed(placed);
    piece.remove_prefix(placed);
  }
  return reader.read(reinterpret_cast<const std::byte*>(piece.data()), piece.size(), inbox);
}

void run(Input in) {
  const std::uint8_t flags = in.byte();
  const std::size_t piece = in.number<std::uint16_t>();
  SmallInbox inbox(1 + std::size_t{in.number<std::uint16_t>()} * 16);
  const Limits limits = limits_of(flags);
  FrameReader reader;
  reader.set_limits(limits);
  const std::string_view stream = in.rest();
  std::string_view unread = stream;
  bool good = true, has_memory = true;
  try {
    while (good && !unread.empty()) {
      const std::string_view next = unread.substr(0, piece == 0 ? unread.size() : piece);
      unread.remove_prefix(next.size());
      good = read(reader, next, flags & kDirect, inbox);
    }
  } catch (const std::bad_alloc&) {  // no memory for a message that cannot be discarded: the link breaks
    has_memory = false;
  }
  require(good == reader.error().empty(), "a failure has a reason");
  if (good && has_memory) reader.end();
  std::string_view left = stream;
  bool whole = true;
  for (const Incoming& message : inbox.messages) check(message, limits, left, whole);
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}

// What moves between peers: a fixed header, an interned name, a body, and segments of memory out of band.
//
// On a byte stream a frame is
//     FrameHeader | SegmentHeader x segment_count | name | body | segments in order
// all little-endian. The core reads `type`, `call_id`, the flags below, `timeout` and `credit`; `tag` and the rest of
// `flags` belong to the layers above.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/limits.h"
#include "core/pool.h"

namespace telegrad {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr std::uint32_t kMagic = 0x31524754;  // "TGR1"
inline constexpr std::uint32_t kProtocolVersion = 3;

enum class FrameType : std::uint8_t {
  kHello = 1,      // handshake, initiator: who I am, whom I want, a nonce
  kChallenge = 2,  // handshake, acceptor: who I am, a nonce, proof over both
  kProof = 3,      // handshake, initiator: proof over both
  kWelcome = 4,    // handshake, acceptor: the link is open
  kRefuse = 5,     // handshake, either: no, and why
  kRequest = 16,   // answered by exactly one kReply with the same call_id
  kReply = 17,
  kOneway = 18,   // never answered
  kCredit = 19,   // carries nothing but `credit`, and as call_id the window of a sender that waits
  kGoodbye = 20,  // orderly end: what follows is end of stream
  kPiece = 21,    // a part of a message that is spread over several lanes; see transports/lanes.h
};

inline bool is_handshake(FrameType t) { return t <= FrameType::kRefuse; }

enum FrameFlags : std::uint16_t {
  kNested = 1 << 15,  // the request was made from inside a handler: it always finds a thread
  // What its caller has given up on matters all the same: the reply must be seen, the request must be sent.
  kMayLinger = 1 << 14,
  // The content is left out: the message is over its receiver's limits, or the receiver has no memory for it. The body
  // says which, and why, and the trailer is the only segment. See core/left_out.h.
  kLeftOut = 1 << 13,
  // The last segment is a trailer: what both ends count on, and what is kept of a message whose content is left out.
  kTrailer = 1 << 2,
};

struct FrameHeader {
  std::uint32_t magic = kMagic;
  FrameType type{};
  std::uint8_t tag = 0;
  std::uint16_t flags = 0;
  std::uint32_t name_id = 0;    // 0: none
  std::uint32_t name_size = 0;  // bytes of the name's definition; 0 once the receiver knows the id
  std::uint64_t body_size = 0;
  std::uint32_t segment_count = 0;
  std::uint32_t reserved = 0;
  std::uint64_t call_id = 0;
  std::int64_t timeout = 0;  // requests: nanoseconds left; 0: no limit. Pieces: where in the message they belong
  std::uint64_t credit = 0;  // request bytes taken up by the sender of this frame since its last frame
};
static_assert(sizeof(FrameHeader) == 56);

struct SegmentHeader {
  std::uint64_t size = 0;
  std::uint64_t lease = 0;  // 0: the bytes follow in the frame; else they lie where the transport's lease says
};
static_assert(sizeof(SegmentHeader) == 16);

class Common;  // what goes to several peers and lies in memory once, see transports/commons.h

/// Keeps whatever the bytes of an outgoing message live in. Destroyed on any thread, with no lock of the core held.
class Keep {
 public:
  virtual ~Keep() = default;
};

struct OutSegment {
  const std::byte* data;
  std::uint64_t size;
  // 0, or the lease under which the link lent the memory that this lies in (`Link::lend`), and which nobody else holds:
  // then the link hands the memory over instead of its bytes. A link to which the lease means nothing sends the bytes.
  std::uint64_t lease = 0;
  const Common* common = nullptr;  // what it is the whole of, kept by `keep`: for links that can hand it over
};

struct Departure;  // see connection.h

/// A message on its way out. Its body and segments point into memory that `keep` holds.
struct Outgoing {
  FrameHeader header;
  std::string_view name;  // the definition to send if the peer does not know header.name_id yet
  std::string_view body;
  std::vector<OutSegment> segments;
  std::unique_ptr<Keep> keep;
  bool owned = false;                    // nobody else can change its bytes: see `own_memory`
  bool scattered = false;                // by the link: its segments leave in pieces, in no order
  std::shared_ptr<Departure> departure;  // told what becomes of a message that waits for its link
  std::string reason;                    // the body of a message whose content is left out

  // Owned by the link that sends it: how many bytes have left, of the prefix, the body and the segments in that order.
  std::uint64_t sent = 0;
  std::uint64_t total = 0;   // bytes of the frame, once it has been begun
  std::size_t segment = 0;   // those before it have left,
  std::uint64_t passed = 0;  // which are so many bytes
  std::string prefix;        // header, segment headers and name, as sent

  std::uint64_t payload_size() const {
    std::uint64_t n = body.size();
    for (const auto& s : segments) n += s.size;
    return n;
  }
};

/// Copies what has not been sent yet into memory of the message's own, so that whoever lent it may change it. Not while
/// the link sends it. Returns what kept the lent memory, to be let go where no lock is held; null if nothing is lent,
/// or if there is no memory for a copy: then it stays lent.
std::unique_ptr<Keep> own_memory(Outgoing& message);

/// What a request counts against a peer's window.
inline std::int64_t weight(std::uint64_t payload) { return static_cast<std::int64_t>(sizeof(FrameHeader) + payload); }

/// A message that arrived whole.
struct Incoming {
  FrameHeader header;
  std::string name;
  BlockPtr body;  // null when empty
  std::vector<BlockPtr> segments;
  // Not 0: there was no memory for so many bytes. The link has read and discarded them, but for the trailer.
  std::uint64_t discarded = 0;

  std::uint64_t payload_size() const {
    if (discarded > 0) return discarded;
    std::uint64_t n = body ? body->size() : 0;
    for (const auto& s : segments) n += s->size();
    return n;
  }

  std::string_view body_view() const {
    return body ? std::string_view(reinterpret_cast<const char*>(body->data()), body->size()) : std::string_view();
  }
};

}  // namespace telegrad

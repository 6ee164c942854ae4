// Messages: a fixed header, an interned name, a body, and segments of memory out of band.
//
// On a byte stream a frame is
//     FrameHeader | SegmentHeader x segment_count | name | body | segments in order
// all little-endian. The core reads `type`, `call_id`, the flags below, `timeout` and `credit`; `tag` and the other
// `flags` belong to the layers above.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "core/limits.h"
#include "memory/block.h"
#include "wire/constants.h"

namespace telegrad {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr std::uint32_t kMagic = 0x31524754;  // "TGR1"
inline constexpr std::uint32_t kProtocolVersion = 15;

enum class FrameType : std::uint8_t {
  kHello = 1,      // handshake, initiator: own identity, wanted identity, nonce
  kChallenge = 2,  // handshake, acceptor: nonce
  kProof = 3,      // handshake, initiator: proof over both
  kWelcome = 4,    // handshake, acceptor: the connection is open
  kRefuse = 5,     // handshake, either end: rejected, with the reason if the receiver has proven itself
  kAnswer = 6,     // handshake, acceptor: own identity, proof over all of it
  kConfirm = 7,    // handshake, initiator: it has checked the answer
  kRequest = 16,   // answered by exactly one kReply with the same call_id
  kReply = 17,
  kOneway = 18,     // never answered
  kCredit = 19,     // carries only `credit`, and in call_id the window of a sender that waits
  kGoodbye = 20,    // orderly end of stream
  kFragment = 21,   // part of a large message; see transports/fragments/fragments.h
  kCancel = 22,     // ends the request with this call_id; `tag` is a CancelReason
  kCallState = 23,  // answers a kCancel with kExpired: `tag` is the CallState of the request
  kPing = 24,       // asks for a sign of life
  kPong = 25,       // answers a kPing at once
  kAck = 26,        // call_id: how many messages have arrived; see transports/tcp/resumable_link.h
};

/// Reason for a kCancel.
enum class CancelReason : std::uint8_t {
  kCanceled = 1,  // the program no longer needs the result
  kExpired = 2,   // the deadline has passed, and the caller asks how far the request has come
};

/// How far a call had come when it timed out.
enum class CallState : std::uint8_t {
  kUnknown = 0,  // the callee did not say it in time
  kWaiting = 1,  // not sent: it waited for a connection or for the callee's window
  kQueued = 2,   // at the callee, and has not run
  kRunning = 3,
  kReplied = 4,  // the callee has replied, but the reply was late or lost
};

/// Returns the name of a state for errors; "unknown" for a number that a peer has made up.
constexpr const char* name_of(CallState state) {
  using Text = wire::CallStateText;
  switch (state) {
    case CallState::kUnknown:
      return Text::kUnknown;
    case CallState::kWaiting:
      return Text::kWaiting;
    case CallState::kQueued:
      return Text::kQueued;
    case CallState::kRunning:
      return Text::kRunning;
    case CallState::kReplied:
      return Text::kReplyLost;
  }
  return Text::kUnknown;
}

inline bool is_handshake(FrameType t) { return t <= FrameType::kConfirm; }

/// Returns whether a frame has a number: the count of such frames before it on its connection.
inline bool is_numbered(FrameType t) { return !is_handshake(t) && t != FrameType::kFragment && t != FrameType::kAck; }

enum FrameFlags : std::uint16_t {
  kNested = wire::Flag::kNested,  // the request was made inside a handler: it always finds a thread
  // The message is delivered even if its caller has given up: the request is sent, or the reply is processed.
  kMustDeliver = wire::Flag::kMustDeliver,
  // The content is left out, because the message is over its receiver's limits or the receiver has no memory for it.
  // The body has the kind and the reason, and the trailer is the only segment. See core/left_out.h.
  kLeftOut = wire::Flag::kLeftOut,
  // The request runs even if its caller cancels it, is lost, or its deadline has passed: others count on its result.
  kMustRun = wire::Flag::kMustRun,
  // The handler has seen that the deadline of its request had passed: its reply is no result.
  kLate = wire::Flag::kLate,
  // The last segment is a trailer: data that both ends count on, kept when the content of a message is left out.
  kTrailer = wire::Flag::kMetadata,
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
  std::uint32_t depth = 0;  // requests: of nested calls, 0 for a call that no handler made
  std::uint64_t call_id = 0;
  std::int64_t timeout = 0;  // requests: nanoseconds left; 0: no limit. Fragments: offset in the message
  std::uint64_t credit = 0;  // request bytes that the sender of this frame has processed since its last frame
};
static_assert(sizeof(FrameHeader) == 56);

struct SegmentHeader {
  std::uint64_t size = 0;
  std::uint64_t lease = 0;  // 0: the bytes follow in the frame; else the transport's lease says where they reside
};

/// Lease of a segment whose bytes follow the frame in fragments.
inline constexpr std::uint64_t kFragmented = 1;
static_assert(sizeof(SegmentHeader) == 16);

/// Owner of the memory of an outgoing message. Destroyed on any thread, while no lock of the core is held.
class KeepAlive {
 public:
  virtual ~KeepAlive() = default;
  /// Returns whether the memory of a message is certain to be what it was when the message was given to the engine. Of
  /// messages that are `verifiable`. May block; a thread of the pool, while no lock of the core is held.
  virtual bool is_unchanged() const { return false; }
  /// Copies a part of the memory of such a message, in the same way. Returns false if it may have changed, or is gone.
  virtual bool read(const std::byte* from, std::size_t size, std::byte* to) const {
    std::memcpy(to, from, size);
    return true;
  }
};

/// Objects to destroy once no lock of the core is held.
using Released = std::vector<std::unique_ptr<KeepAlive>>;

struct PendingSend;  // see connection.h

inline constexpr std::int64_t kAnyEpoch = wire::kAnyEpoch;

/// A message to send. Its body and segments point into memory that `owner` owns.
struct Outgoing {
  FrameHeader header;
  std::string_view name;  // definition to send if the peer does not know header.name_id yet
  std::string_view body;
  std::vector<OutSegment> segments;
  std::unique_ptr<KeepAlive> owner;
  Nanos deadline = kNever;                    // of a request
  std::int64_t epoch = kAnyEpoch;             // of the layer above: not sent after the end of its session
  bool admitted = false;                      // the send queue had room for it, or its thread waits: see overload.h
  bool immutable = false;                     // no other thread can change its bytes: see `copy_payload`
  bool stable = false;                        // its bytes do not change while its call waits: see Resumable::release
  bool verifiable = false;                    // its owner can tell later whether they have changed: see `is_unchanged`
  bool fragmented = false;                    // by the link: segments with the lease kFragmented are sent in any order
  bool large = false;                         // see Link::is_large
  bool prepared = false;                      // its name and its credit are final, because sending has begun
  std::int64_t queued_weight = 0;             // what it counts against the reply window while it is queued,
  std::int64_t kept_weight = 0;               // and against the send queue, once no thread waits for it
  std::int64_t request_weight = 0;            // of a large request: what it counts as unsent while it is queued
  std::shared_ptr<PendingSend> pending_send;  // state of a message that waits for a connection
  std::string reason;                         // the body of a message without content (kLeftOut)

  // Owned by the link that sends it: sent bytes of the header, the prefix, the body and the segments in that order.
  std::uint64_t sent = 0;
  std::uint64_t total = 0;   // bytes of the frame, set when sending begins: from then on the header does not change
  std::size_t segment = 0;   // number of segments sent,
  std::uint64_t passed = 0;  // and their bytes
  std::string prefix;        // segment headers and name, as sent; empty for most calls

  /// Returns whether the link sends it in parts and has begun.
  bool is_begun() const { return total > 0; }
  std::uint64_t payload_size() const {
    std::uint64_t n = body.size();
    for (const auto& s : segments) n += s.size;
    return n;
  }
};

/// Gives a request the time that is left now. A message that has waited gets it again when it is sent.
inline void stamp_timeout(Outgoing& m, Nanos at) {
  if (m.deadline != kNever) m.header.timeout = std::max<Nanos>(m.deadline - at, 1);
}

/// Copies the name, the body and the segments into memory of the message itself, so that the sender may change the
/// original. Not while the link sends the message. Returns the owner of the original memory, to be released while no
/// lock is held. Returns null if nothing was borrowed, or if there is no memory for a copy; then the original stays in
/// use.
std::unique_ptr<KeepAlive> copy_payload(Outgoing& message);

/// Returns the bytes that a request counts against the peer's window.
inline std::int64_t weight(std::uint64_t payload) { return static_cast<std::int64_t>(sizeof(FrameHeader) + payload); }

/// A complete received message.
struct Incoming {
  FrameHeader header;
  std::uint64_t number = 0;           // of a frame on a byte stream, see `is_numbered`
  std::unique_ptr<std::string> name;  // definition of header.name_id; null if the sender has made it before
  BlockPtr body;                      // null when empty
  std::vector<BlockPtr> segments;
  // Not 0: there was no memory for this number of bytes. The link has read and discarded all except the trailer.
  std::uint64_t discarded = 0;
  Nanos begun = 0;  // when the header of a large message arrived; 0: just now

  std::uint64_t payload_size() const {
    if (discarded > 0) return discarded;
    std::uint64_t n = body ? body->size() : 0;
    for (const auto& s : segments) n += s->size();
    return n;
  }

  std::string_view name_view() const { return name ? std::string_view(*name) : std::string_view(); }
  std::string_view body_view() const {
    return body ? std::string_view(reinterpret_cast<const char*>(body->data()), body->size()) : std::string_view();
  }
};

}  // namespace telegrad

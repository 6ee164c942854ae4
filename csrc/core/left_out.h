// Messages without content, because they are over the limits of their receiver, it has no memory for them, or they are
// requests that will not run.
//
// Such a message fails its own call and nothing else. Requests that are canceled before they run end in the same way. A
// request or reply that must be delivered (kMustDeliver) is still sent, with the reason as its body and with its
// trailer, so that the counts of both ends agree. The receiver answers such a request with an error. If the receiving
// link has no memory for a message, it discards the content while reading and delivers the rest.
//
// A request whose caller has given up keeps its content if the peer needs that: see `may_leave_out`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/limits.h"
#include "core/message.h"
#include "memory/buffer_pool.h"
#include "wire/constants.h"

namespace telegrad {

using wire::LeftOut;  // first byte of the body of such a message; the rest of the body is text

/// Returns a number for the text of an error.
inline std::string number(std::uint64_t n) { return std::to_string(n); }

/// Returns whether a message is within the limits of its receiver.
bool fits(const Outgoing& message, const Limits& limits);

/// Returns an error text for the caller: the part of the message that is too large, the limit, and the option to
/// change. `receiver` is the name of the worker with these limits.
std::string over_limits(const Outgoing& message, const Limits& limits, std::string_view receiver);

/// Returns whether a request may lose its content once its caller has given up, by cancellation, timeout or loss. Not
/// if others count on its result (kMustRun). If the peer counts on the request (kMustDeliver), only if the trailer has
/// what the peer counts: without one, the peer needs the content.
inline bool may_leave_out(const FrameHeader& request) {
  return !(request.flags & kMustRun) && (!(request.flags & kMustDeliver) || request.flags & kTrailer);
}

/// Removes the content of a message; the reason and the trailer remain.
void leave_out(Outgoing& message, LeftOut why, std::string_view text);

/// Removes the content of an arrived request that will not run; the reason and the trailer remain.
void leave_out(Incoming& request, LeftOut why, BufferPool& buffers, std::string_view text = {});

/// Returns whether a reply says that the deadline of the request passed before it ran.
inline bool has_expired(const Incoming& reply) {
  return reply.header.flags & kLeftOut && reply.body_view().starts_with(static_cast<char>(LeftOut::kExpired));
}

/// Returns whether an arriving message may be discarded for lack of memory. `bytes`: of its name, body and segments.
inline bool may_be_discarded(FrameType type, std::uint64_t bytes) {
  return (type == FrameType::kRequest || type == FrameType::kReply) && bytes >= kAlwaysTaken;
}

/// Marks an arriving message of this size as discarded for lack of memory; the trailer, its last segment, remains.
void discard(Incoming& message, std::uint64_t bytes);

}  // namespace telegrad

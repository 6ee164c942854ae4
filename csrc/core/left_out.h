// Messages whose content is left out: they are over the limits of their receiver, or it has no memory for them.
//
// Such a message fails its call and nothing else. A request or reply that others count on (kMayLinger) travels all the
// same, with the reason as its body and with its trailer, so that both ends go on counting the same. The receiver of
// such a request answers it with an error. The link that reads a message for which there is no memory discards the
// content as it comes, and delivers the rest.
#pragma once

#include <string>
#include <string_view>

#include "core/limits.h"
#include "core/message.h"

namespace telegrad {

/// The first byte of the body of such a message; the rest of it is text.
enum class LeftOut : char {
  kTooLarge = 'L',  // over the limits
  kNoMemory = 'M',
};

/// Is a message within the limits of its receiver?
bool fits(const Outgoing& message, const Limits& limits);

/// What of a message does not fit, for its caller: what it is, the limit, and the option to change. `receiver` is the
/// name of the worker whose limits these are.
std::string over_limits(const Outgoing& message, const Limits& limits, std::string_view receiver);

/// Leaves the content of a message out: what remains is the reason and the trailer.
void leave_out(Outgoing& message, LeftOut why, std::string_view text);

/// May a message that arrives be discarded, if there is no memory for it? `bytes`: of its name, body and segments.
inline bool may_be_discarded(FrameType type, std::uint64_t bytes) {
  return (type == FrameType::kRequest || type == FrameType::kReply) && bytes >= kAlwaysTaken;
}

/// Gives up a message of so many bytes that arrives, for want of memory: what remains is the trailer, the last segment.
void discard(Incoming& message, std::uint64_t bytes);

}  // namespace telegrad

#include "core/left_out.h"

#include <algorithm>
#include <utility>

namespace telegrad {
namespace {

bool has_trailer(std::uint16_t flags, std::size_t segments) { return flags & kTrailer && segments > 0; }

std::uint64_t trailer_size(const Outgoing& m) {
  return has_trailer(m.header.flags, m.segments.size()) ? m.segments.back().size : 0;
}

}  // namespace

bool fits(const Outgoing& m, const Limits& limits) {
  if (m.body.size() > limits.body || m.name.size() > limits.name) return false;
  if (m.segments.empty()) return true;
  const std::uint64_t trailer = trailer_size(m);
  return m.segments.size() <= limits.segments && trailer <= limits.trailer &&
         m.payload_size() - m.body.size() - trailer <= limits.message;
}

std::string over_limits(const Outgoing& m, const Limits& limits, std::string_view receiver) {
  const std::string to(receiver);
  if (m.body.size() > limits.body) {
    return "a message of " + number(m.body.size()) + " bytes without its tensors is larger than the option " +
           "max_header_bytes of worker " + to + " allows (" + number(limits.body) +
           " bytes). Send large data as tensors or arrays, or raise the option on " + to + ".";
  }
  if (m.segments.size() > limits.segments) {
    return "a message with " + number(m.segments.size()) + " tensors or buffers is more than the " +
           number(limits.segments) + " that worker " + to + " takes. Send it in parts, or stack them.";
  }
  if (m.name.size() > limits.name) {
    return "a function name of " + number(m.name.size()) + " bytes is longer than the " + number(limits.name) +
           " that worker " + to + " takes. Give it a shorter name.";
  }
  return "a message with " + number(m.payload_size() - m.body.size() - trailer_size(m)) +
         " bytes of tensors is larger than the option max_message_bytes of worker " + to + " allows (" +
         number(limits.message) + " bytes). Send it in parts, or raise the option on " + to + ".";
}

void leave_out(Outgoing& m, LeftOut why, std::string_view text) {
  if (has_trailer(m.header.flags, m.segments.size())) {
    m.segments.erase(m.segments.begin(), m.segments.end() - 1);
  } else {
    m.segments.clear();
  }
  m.header.flags |= kLeftOut;
  m.header.name_id = 0;
  m.name = {};
  m.reason = static_cast<char>(why);
  m.reason += text;
  m.body = m.reason;
}

void leave_out(Incoming& m, LeftOut why, BufferPool& buffers, std::string_view text) {
  discard(m, m.payload_size());
  m.header.flags |= kLeftOut;
  m.body = buffers.allocate(1 + text.size());
  m.body->data()[0] = static_cast<std::byte>(why);
  std::copy_n(reinterpret_cast<const std::byte*>(text.data()), text.size(), m.body->data() + 1);
}

void discard(Incoming& m, std::uint64_t bytes) {
  const bool keeps = has_trailer(m.header.flags, m.segments.size());
  BlockPtr trailer = keeps ? std::move(m.segments.back()) : nullptr;
  m.body.reset();
  m.segments.clear();
  if (trailer) m.segments.push_back(std::move(trailer));
  m.discarded = bytes;
}

}  // namespace telegrad

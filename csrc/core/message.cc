#include "core/message.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace telegrad {

std::unique_ptr<KeepAlive> copy_payload(Outgoing& m) {
  struct Copy final : KeepAlive {
    std::unique_ptr<std::byte[]> bytes;
    std::unique_ptr<KeepAlive> lease;  // leased memory is not copied, because no thread changes it
  };
  if (m.immutable || m.segments.empty()) return nullptr;
  const auto is_leased = [](const OutSegment& s) { return s.lease != 0 && s.lease != kFragmented; };
  const bool leased = std::ranges::any_of(m.segments, is_leased);
  std::uint64_t size = m.name.size() + m.payload_size();
  for (const OutSegment& s : m.segments) size -= is_leased(s) ? s.size : 0;
  auto copy = std::make_unique<Copy>();
  copy->bytes.reset(new (std::nothrow) std::byte[size]);
  if (!copy->bytes) return nullptr;
  std::byte* at = copy->bytes.get();
  auto copied = [&at](const void* from, std::uint64_t n) {
    if (n > 0) std::memcpy(at, from, n);
    return std::exchange(at, at + n);
  };
  auto text = [&](std::string_view s) {
    return std::string_view(reinterpret_cast<const char*>(copied(s.data(), s.size())), s.size());
  };
  // Sent bytes are copied too: after the loss of its connection, a link sends the message from its beginning.
  m.name = text(m.name);
  m.body = text(m.body);
  std::vector<OutSegment> segments;
  segments.reserve(m.segments.size());
  for (const OutSegment& s : m.segments) {
    if (is_leased(s)) {
      segments.push_back(s);
    } else {
      segments.push_back({copied(s.data, s.size), s.size, s.lease});
    }
  }
  m.segments = std::move(segments);
  m.segment = 0;
  m.passed = 0;
  m.immutable = true;
  if (leased) copy->lease = std::move(m.owner);
  auto spent = std::exchange(m.owner, std::move(copy));
  return spent;
}

}  // namespace telegrad

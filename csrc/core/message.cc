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
  const bool begun = !m.prefix.empty();
  const bool has_lease = std::any_of(m.segments.begin(), m.segments.end(), [](const auto& s) { return s.lease != 0; });
  const bool leased = has_lease && !m.fragmented;
  // Sent bytes of the body and segments need not be copied. With leases or fragments, the sent part is unknown.
  const bool whole = leased || m.fragmented;
  std::uint64_t sent_bytes = begun && !whole && m.sent > m.prefix.size() ? m.sent - m.prefix.size() : 0;
  const std::uint64_t size = (begun ? 0 : m.name.size()) + m.payload_size() - sent_bytes;
  auto copy = std::make_unique<Copy>();
  copy->bytes.reset(new (std::nothrow) std::byte[size]);
  if (!copy->bytes) return nullptr;
  std::byte* at = copy->bytes.get();
  auto copied = [&at](const void* from, std::uint64_t n) {
    if (n > 0) std::memcpy(at, from, n);
    return std::exchange(at, at + n);
  };
  auto rest = [&sent_bytes](auto* data, std::uint64_t n) {
    const std::uint64_t skip = std::min(sent_bytes, n);
    sent_bytes -= skip;
    return std::pair(data + skip, n - skip);
  };
  auto text = [&](std::string_view s) {
    return std::string_view(reinterpret_cast<const char*>(copied(s.data(), s.size())), s.size());
  };
  m.name = begun ? std::string_view() : text(m.name);  // once sending has begun, the prefix contains it
  const auto [body, body_size] = rest(m.body.data(), m.body.size());
  m.body = text({body, body_size});
  std::vector<OutSegment> segments;
  segments.reserve(m.segments.size());
  for (const OutSegment& s : m.segments) {
    const auto [data, n] = rest(s.data, s.size);
    if (s.lease != 0 && leased) {
      segments.push_back(s);
    } else if (n > 0 || !begun || whole) {
      segments.push_back({copied(data, n), n, s.lease});
    }
  }
  m.segments = std::move(segments);
  if (!whole) m.sent = std::min<std::uint64_t>(m.sent, m.prefix.size());
  m.segment = 0;
  m.passed = m.total = 0;
  m.immutable = true;
  if (leased) copy->lease = std::move(m.owner);
  auto spent = std::exchange(m.owner, std::move(copy));
  return spent;
}

}  // namespace telegrad

#include "transports/fragments/fragments.h"

#include <algorithm>

namespace telegrad {

std::uint64_t large_bytes(const Outgoing& m, const FragmentSizes& sizes) {
  std::uint64_t bytes = 0;
  for (const OutSegment& s : m.segments) bytes += s.size >= sizes.segment ? s.size : 0;
  return bytes >= sizes.message ? bytes : 0;
}

bool Fragmenter::cut(const Outgoing& m, Fragment& fragment) {
  while (segment_ < m.segments.size()) {
    const OutSegment& s = m.segments[segment_];
    if (s.lease != kFragmented || offset_ == s.size) {
      ++segment_;
      offset_ = 0;
      continue;
    }
    const std::uint64_t size = std::min(s.size - offset_, size_);
    fragment.out = Outgoing();
    fragment.out.header.type = FrameType::kFragment;
    fragment.out.header.call_id = number_;
    fragment.out.header.timeout = static_cast<std::int64_t>(place_);
    fragment.out.segments.push_back({s.data + offset_, size});
    fragment.segment = segment_;
    fragment.offset = offset_;
    fragment.busy = true;
    offset_ += size;
    place_ += size;
    return true;
  }
  return false;
}

}  // namespace telegrad

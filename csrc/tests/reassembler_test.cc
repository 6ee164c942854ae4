// What a hostile sender can make a reassembler keep. laned_link_test.cc has its behavior on a link.
#include "transports/fragments/reassembler.h"

#include "tests/links.h"

namespace telegrad::test {
namespace {

/// Limits of which the bytes of a message are a small part.
constexpr Limits kSmall{.body = 64 << 20, .message = 1 << 20, .segments = 1 << 10, .trailer = 1 << 10};

/// Begins large messages whose only fragment, of one byte, is missing. Content has a size, but no memory.
struct FragmentSource {
  FragmentSource() { reassembler.set_limits(kSmall); }
  /// Returns whether the frame is accepted.
  bool begin(std::uint64_t body, std::uint32_t segments = 0, std::size_t name = 0) {
    Incoming m;
    m.header.type = FrameType::kRequest;
    m.header.call_id = number++;
    m.header.segment_count = segments + 1;
    m.name = std::make_unique<std::string>(name, 'n');
    if (body > 0) m.body = std::make_unique<Discarded>(body);
    m.segments.push_back(reassembler.map_segment(m.header, {.size = 1, .lease = kFragmented}, inbox));
    for (std::uint32_t i = 0; i < segments; ++i) m.segments.push_back(std::make_unique<Discarded>(0));
    return accept(std::move(m));
  }
  /// Completes a message.
  bool complete(std::uint64_t of) {
    Incoming m;
    m.header.type = FrameType::kFragment;
    m.header.call_id = of;
    m.segments.push_back(reassembler.map_segment(m.header, {.size = 1, .lease = 0}, inbox));
    return accept(std::move(m));
  }
  bool accept(Incoming&& m) {
    const bool good = reassembler.accept(std::move(m));
    reassembler.deliver(inbox);
    return good;
  }
  /// Returns how many messages are accepted, of up to `most`.
  std::uint64_t count(std::uint64_t most, std::uint64_t body, std::uint32_t segments = 0, std::size_t name = 0) {
    std::uint64_t n = 0;
    while (n < most && begin(body, segments, name)) ++n;
    return n;
  }
  Reassembler reassembler;
  RecordingInbox inbox;
  std::uint64_t number = 0;
};

CASE(incomplete_messages_are_limited) {
  FragmentSource s;
  CHECK_EQ(s.count(2 * kMaxIncomplete, 0), kMaxIncomplete + 1);
  CHECK(s.inbox.messages.empty());
}

/// Only those that are incomplete at the same time count.
CASE(any_number_of_messages_may_follow_each_other) {
  FragmentSource s;
  CHECK(s.begin(0));
  for (std::uint64_t n = 0; n < 2 * kMaxIncomplete; ++n) {
    CHECK(s.begin(0));
    CHECK(s.complete(n));
  }
  CHECK_EQ(s.inbox.messages.size(), 2 * kMaxIncomplete);
}

CASE(what_incomplete_messages_hold_is_limited) {
  const std::uint64_t most = kMaxMissing + kSmall.body + kSmall.message + kSmall.trailer;
  const std::uint64_t of_segments = std::uint64_t{kSmall.segments} * 128;
  {
    FragmentSource s;
    const std::uint64_t n = s.count(2 * kMaxIncomplete, kSmall.body);
    CHECK(n >= kMaxMissing / kSmall.body && n <= (most + of_segments) / kSmall.body + 2);
  }
  FragmentSource s;  // blocks and names take memory, too
  const std::uint64_t n = s.count(kMaxIncomplete, 400 << 10, kSmall.segments - 1, 100 << 10);
  CHECK(n < kMaxIncomplete && n * ((500 << 10) + of_segments) <= most + 2 * (of_segments + (500 << 10)));
}

/// A message of the largest size may follow one that is incomplete.
CASE(the_largest_message_may_follow_an_incomplete_one) {
  FragmentSource s;
  CHECK(s.begin(kSmall.body, kSmall.segments - 1));
  CHECK(s.begin(kSmall.body, kSmall.segments - 1));
  CHECK(s.begin(0));
  CHECK(s.complete(0) && s.complete(1) && s.complete(2));
  CHECK_EQ(s.inbox.messages.size(), 3u);
}

}  // namespace
}  // namespace telegrad::test

// Stream links with malformed input: garbage, truncation, false sizes, random changes.
#include "transports/stream/stream_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "tests/links.h"

namespace telegrad::test {
namespace {

constexpr SocketKind kTestSocket{.peer_credentials = remote_credentials};

/// A stream link with a bare socket as its other end.
struct Raw {
  Raw() {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    socket = UniqueFd(ends[0]);
    link = std::make_unique<StreamLink>(std::make_unique<ByteStream>(UniqueFd(ends[1])), "test", false, kTestSocket);
  }
  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0) return;  // the link has closed
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
  }
  ReceiveState receive() { return link->receive(inbox, kAnyBudget); }
  void end() { socket = UniqueFd(); }
  UniqueFd socket;
  std::unique_ptr<StreamLink> link;
  RecordingInbox inbox;
};

template <class T>
std::string raw(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

/// The expected bytes of a frame.
std::string wire(const Message& m) {
  FrameHeader h = m.header;
  h.name_size = static_cast<std::uint32_t>(m.name.size());
  h.body_size = m.body.size();
  h.segment_count = static_cast<std::uint32_t>(m.segments.size());
  std::string out = raw(h);
  for (const auto& s : m.segments) out += raw(SegmentHeader{.size = s.size(), .lease = 0});
  out += m.name + m.body;
  for (const auto& s : m.segments) out += s;
  return out;
}

void check_refused(const std::string& bytes, const std::string& why) {
  Raw r;
  r.write(bytes);
  CHECK(r.receive() == ReceiveState::kBroken);
  CHECK_SAYS(r.link->error().text, why);
  CHECK_EQ(r.link->error().code, EPROTO);
  CHECK_EQ(r.inbox.allocations, 0);
  CHECK(r.inbox.messages.empty());
}

CASE(the_wire_format_is_as_documented) {
  Random random(1);
  const Message m = random_message(random, 1000, {0, 70000, 3}, 20);
  Raw in;
  in.write(wire(m));
  CHECK(in.receive() == ReceiveState::kIdle);
  CHECK_EQ(in.inbox.messages.size(), 1u);
  check_same(m, in.inbox.messages[0]);

  Raw out;
  Outgoing o = m.outgoing();
  CHECK(out.link->send(o) == SendState::kSent);
  std::string sent(wire(m).size(), '\0');
  CHECK_EQ(::recv(out.socket.get(), sent.data(), sent.size(), MSG_WAITALL), static_cast<ssize_t>(sent.size()));
  CHECK(sent == wire(m));
}

CASE(input_byte_by_byte) {
  Random random(2);
  const Message first = random_message(random, 100, {5, 0, 70}, 9), second = random_message(random, 0);
  Raw r;
  for (const char c : wire(first) + wire(second)) {
    r.write({&c, 1});
    CHECK(r.receive() == ReceiveState::kIdle);
  }
  CHECK_EQ(r.inbox.messages.size(), 2u);
  check_same(first, r.inbox.messages[0]);
  check_same(second, r.inbox.messages[1]);
}

CASE(input_in_parts_of_random_sizes) {
  Random random(3);
  std::vector<Message> sent;
  std::string bytes;
  for (int i = 0; i < times(300); ++i) {
    std::vector<std::size_t> segments;
    for (std::uint64_t n = random.below(5); n > 0; --n)
      segments.push_back(random.below(random.below(3) ? 200 : 100'000));
    sent.push_back(random_message(random, random.below(random.below(4) ? 300 : 70'000), segments, random.below(40)));
    bytes += wire(sent.back());
  }
  Raw r;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t n = std::min<std::size_t>(1 + random.below(random.below(2) ? 80 : 90'000), bytes.size() - at);
    r.write(std::string_view(bytes).substr(at, n));
    at += n;
    while (r.link->receive(r.inbox, 1 + random.below(100'000)) == ReceiveState::kMore) {
    }
  }
  CHECK_EQ(r.inbox.messages.size(), sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) check_same(sent[i], r.inbox.messages[i]);
}

CASE(truncated_at_every_byte) {
  Random random(4);
  const std::string whole = wire(random_message(random, 30, {5, 0, 20}, 9));
  for (std::size_t n = 0; n < whole.size(); ++n) {
    Raw r;
    r.write(whole + whole.substr(0, n));
    r.end();
    ReceiveState state;
    while ((state = r.receive()) != ReceiveState::kBroken) {
    }
    CHECK_EQ(r.inbox.messages.size(), 1u);
    CHECK_EQ(r.link->error().text, n == 0 ? "" : "the stream ended in the middle of a frame");
    CHECK_EQ(r.link->error().code, n == 0 ? 0 : EPROTO);
  }
}

CASE(bytes_that_are_not_a_frame) {
  check_refused(std::string(56, '\0'), "not a Telegrad frame");
  check_refused("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0 and some more\r\n\r\n",
                "not a Telegrad frame");
  check_refused(std::string("\x16\x03\x01\x02", 4) + std::string(100, '\1'),
                "the other end encrypts, and this one does not");
  std::string almost = wire(Message{});
  almost[3] = '2';
  check_refused(almost, "not a Telegrad frame");
}

CASE(false_sizes) {
  constexpr auto kMax64 = std::numeric_limits<std::uint64_t>::max();
  constexpr auto kMax32 = std::numeric_limits<std::uint32_t>::max();
  const Limits limits;
  for (const std::uint64_t size : {limits.body + 1, kMax64 / 2, kMax64}) {
    check_refused(raw(FrameHeader{.body_size = size}), "over the limits");
  }
  for (const std::uint32_t count : {limits.segments + 1, kMax32}) {
    check_refused(raw(FrameHeader{.segment_count = count}), "over the limits");
  }
  for (const std::uint32_t size : {limits.name + 1, kMax32}) {
    check_refused(raw(FrameHeader{.name_size = size}), "over the limits");
  }
  const auto two = [](std::uint64_t a, std::uint64_t b) {
    return raw(FrameHeader{.segment_count = 2}) + raw(SegmentHeader{.size = a}) + raw(SegmentHeader{.size = b});
  };
  for (auto [a, b] : {std::pair{kMax64, kMax64},
                      {kMax64, std::uint64_t{1}},
                      {limits.message, std::uint64_t{1}},
                      {kMax64 / 2 + 1, kMax64 / 2 + 1},
                      {std::uint64_t{0}, limits.message + 1}}) {
    check_refused(two(a, b), "over the limit");
  }
  check_refused(raw(FrameHeader{.segment_count = 1}) + raw(SegmentHeader{.size = 5, .lease = 1}), "shared memory");
}

CASE(a_count_alone_allocates_no_memory) {
  Raw r;
  r.write(raw(FrameHeader{.name_size = 1000, .body_size = 1 << 29, .segment_count = 1 << 20}));
  CHECK(r.receive() == ReceiveState::kIdle);
  r.write(raw(SegmentHeader{.size = 1 << 30}));
  CHECK(r.receive() == ReceiveState::kIdle);
  CHECK_EQ(r.inbox.allocations, 0);
  r.end();
  CHECK(r.receive() == ReceiveState::kBroken);
}

CASE(an_end_in_the_middle_releases_memory) {
  auto pool = BufferPool::make(0);
  {
    Raw r;
    r.inbox.pool = pool;
    r.write(raw(FrameHeader{.body_size = 100'000, .segment_count = 1}) + raw(SegmentHeader{.size = 200'000}) + "some");
    CHECK(r.receive() == ReceiveState::kIdle);
    CHECK_EQ(pool->stats().live_blocks, 2u);
  }
  CHECK_EQ(pool->stats().live_blocks, 0u);
}

/// Frames with changed, removed and added bytes: no crash, and no allocation over the limits.
CASE(mutated_frames) {
  const Limits limits{.body = 1000, .message = 2000, .segments = 8, .name = 100, .trailer = 500};
  Random random(5);
  for (int round = 0; round < times(30'000); ++round) {
    std::string bytes;
    for (int i = 0; i < 3; ++i) {
      bytes +=
          wire(random_message(random, random.below(300), {random.below(100), random.below(100)}, random.below(50)));
    }
    for (std::uint64_t n = 1 + random.below(4); n > 0; --n) {
      const std::size_t at = random.below(bytes.size());
      switch (random.below(4)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
          break;
        case 1:
          bytes[at] = static_cast<char>(random.below(2) ? 0xff : 0);
          break;
        case 2:
          bytes.erase(at, 1 + random.below(20));
          break;
        default:
          bytes.insert(at, random.bytes(1 + random.below(20)));
      }
      if (bytes.empty()) bytes = "x";
    }
    Raw r;
    r.link->set_limits(limits);
    r.write(bytes);
    r.end();
    while (r.receive() != ReceiveState::kBroken) {
    }
    CHECK(r.inbox.messages.size() <= 4 + bytes.size() / sizeof(FrameHeader));
    for (const Incoming& m : r.inbox.messages) {
      CHECK(m.name_view().size() <= limits.name && m.segments.size() <= limits.segments);
      CHECK(!m.body || m.body->size() <= limits.body);
    }
    CHECK(r.inbox.allocated <= (r.inbox.messages.size() + 1) * (limits.body + limits.message + limits.trailer));
  }
}

CASE(a_send_that_the_kernel_rejects_breaks_the_link_with_a_reason) {
  Raw r;
  Outgoing m;
  m.segments.push_back({reinterpret_cast<const std::byte*>(std::uintptr_t{64}), 1 << 20});  // no such memory
  CHECK(r.link->send(m) == SendState::kBroken);
  CHECK(r.receive() == ReceiveState::kBroken);
  CHECK_SAYS(r.link->error().text, "Bad address");
  CHECK_EQ(r.link->error().code, EFAULT);
  char byte;
  while (::recv(r.socket.get(), &byte, 1, 0) > 0) {
  }  // the other end sees the end of stream
}

CASE(a_reset_has_its_code) {
  Raw r;
  Outgoing m;
  CHECK(r.link->send(m) == SendState::kSent);
  r.end();  // with unread bytes
  CHECK(r.receive() == ReceiveState::kBroken);
  CHECK_EQ(r.link->error().code, ECONNRESET);
}

}  // namespace
}  // namespace telegrad::test

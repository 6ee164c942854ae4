// Links with lanes: malformed fragments, and lanes that break. transport_*_test.cc show that messages arrive complete
// and in order over lanes.
#include "transports/tcp/laned_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <set>

#include "tests/links.h"

namespace telegrad::test {
namespace {

constexpr SocketKind kTestSocket{.peer_credentials = remote_credentials};

template <class T>
std::string raw(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

/// A link with one lane; the other ends of both connections are bare sockets.
struct Raw {
  Raw() {
    auto end = [](UniqueFd& mine) {
      int ends[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      mine = UniqueFd(ends[0]);
      return std::make_unique<LanedLink>(std::make_unique<ByteStream>(UniqueFd(ends[1])), "test", false, kTestSocket);
    };
    link = end(first);
    CHECK(link->add_lane(end(lane)));
    CHECK_EQ(link->lanes(), 1u);
  }
  static void write(const UniqueFd& to, const std::string& bytes) {
    CHECK_EQ(::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  ReceiveState receive() { return test::receive(*link, inbox, kAnyBudget); }
  UniqueFd first, lane;
  std::unique_ptr<LanedLink> link;
  RecordingInbox inbox;
};

/// The frame of a message with fragmented segments.
std::string frame(std::uint64_t call, const std::vector<std::uint64_t>& segments, std::uint64_t lease = kFragmented) {
  FrameHeader h;
  h.type = FrameType::kRequest;
  h.call_id = call;
  h.segment_count = static_cast<std::uint32_t>(segments.size());
  std::string out = raw(h);
  for (const std::uint64_t size : segments) out += raw(SegmentHeader{.size = size, .lease = lease});
  return out;
}

std::string fragment(std::uint64_t number, std::uint64_t place, const std::string& bytes) {
  FrameHeader h;
  h.type = FrameType::kFragment;
  h.call_id = number;
  h.timeout = static_cast<std::int64_t>(place);
  h.segment_count = 1;
  return raw(h) + raw(SegmentHeader{.size = bytes.size()}) + bytes;
}

std::string text(const BlockPtr& block) {
  return std::string(reinterpret_cast<const char*>(block->data()), block->size());
}

CASE(fragments_in_any_order_over_any_connection) {
  Raw r;
  r.write(r.first, frame(1, {6, 4}) + fragment(0, 3, "def"));
  r.write(r.lane, fragment(0, 6, "ghij") + fragment(0, 0, "abc"));
  CHECK(r.receive() == ReceiveState::kIdle);
  CHECK_EQ(r.inbox.messages.size(), 1u);
  CHECK_EQ(text(r.inbox.messages[0].segments[0]), "abcdef");
  CHECK_EQ(text(r.inbox.messages[0].segments[1]), "ghij");
  CHECK_EQ(r.inbox.allocations, 2);  // read directly into place
}

CASE(a_fragment_that_arrives_before_its_frame) {
  Raw r;
  r.write(r.lane, fragment(0, 2, "cd"));
  CHECK(r.receive() == ReceiveState::kIdle);
  CHECK(!readable(*r.link, 0));
  r.write(r.lane, fragment(1, 0, "x"));  // not read before the lane's first fragment has its place
  CHECK(!readable(*r.link, 0));
  r.write(r.first, frame(1, {4}) + frame(2, {1}));
  CHECK(r.receive() == ReceiveState::kIdle);
  CHECK(r.inbox.messages.empty());
  r.write(r.first, fragment(0, 0, "ab"));
  receive_until(*r.link, r.inbox, 2);
  CHECK_EQ(text(r.inbox.messages[0].segments[0]), "abcd");
  CHECK_EQ(text(r.inbox.messages[1].segments[0]), "x");
}

std::string small(FrameType type, std::uint64_t call) { return raw(FrameHeader{.type = type, .call_id = call}); }

/// Checks the types of the messages that have arrived.
void check_arrived(const RecordingInbox& inbox, const std::vector<FrameType>& types) {
  CHECK_EQ(inbox.messages.size(), types.size());
  for (std::size_t i = 0; i < types.size(); ++i) CHECK(inbox.messages[i].header.type == types[i]);
}

CASE(large_messages_keep_their_order_and_small_ones_overtake_them) {
  Raw r;
  r.write(r.first, frame(1, {2}) + frame(2, {2}) + small(FrameType::kOneway, 3));
  r.write(r.lane, fragment(1, 0, "cd"));
  CHECK(r.receive() == ReceiveState::kIdle);
  check_arrived(r.inbox, {FrameType::kOneway});
  r.write(r.lane, fragment(0, 0, "ab"));
  receive_until(*r.link, r.inbox, 3);
  for (std::uint64_t i = 1; i < 3; ++i) CHECK_EQ(r.inbox.messages[i].header.call_id, i);
}

/// The fragments of a message may arrive later, over a lane, than what the sender sent after them.
CASE(what_must_not_overtake_waits_at_the_receiver) {
  Raw r;
  std::string oneway = frame(2, {2});
  oneway[offsetof(FrameHeader, type)] = static_cast<char>(FrameType::kOneway);
  r.write(r.first, frame(1, {2}) + small(FrameType::kCancel, 1) + small(FrameType::kCancel, 9) + oneway +
                       small(FrameType::kOneway, 3) + small(FrameType::kPing, 0) + small(FrameType::kGoodbye, 0) +
                       small(FrameType::kReply, 4));
  CHECK(r.receive() == ReceiveState::kIdle);
  check_arrived(r.inbox, {FrameType::kCancel, FrameType::kPing});
  CHECK_EQ(r.inbox.messages[0].header.call_id, 9u);
  r.inbox.messages.clear();
  r.write(r.lane, fragment(0, 0, "ab"));
  receive_until(*r.link, r.inbox, 2);
  check_arrived(r.inbox, {FrameType::kRequest, FrameType::kCancel});
  r.inbox.messages.clear();
  r.write(r.lane, fragment(1, 0, "cd"));
  receive_until(*r.link, r.inbox, 4);
  check_arrived(r.inbox, {FrameType::kOneway, FrameType::kOneway, FrameType::kGoodbye, FrameType::kReply});
}

/// A peer cannot make this end keep any number of messages that wait for an incomplete one.
CASE(messages_that_wait_are_limited) {
  for (const std::size_t body : {std::size_t{0}, std::size_t{1} << 20}) {
    Raw r;
    FrameHeader h{.type = FrameType::kCancel, .body_size = body, .call_id = 1};
    const std::string one = raw(h) + std::string(body, 'x');
    std::thread peer([&] {
      r.write(r.first, frame(1, {2}));
      while (::send(r.first.get(), one.data(), one.size(), MSG_NOSIGNAL) > 0) {
      }
    });
    while (r.receive() != ReceiveState::kBroken) readable(*r.link);
    CHECK_SAYS(r.link->error().text, "do not fit");
    CHECK(r.inbox.allocated <= (80 << 20));
    r.link->close();
    peer.join();
  }
}

/// Sends a large message of which the other end has read nothing, and then small ones.
CASE(small_messages_are_sent_between_fragments) {
  for (const char* scheme : {"tcp", "unix", "shm", "lanes"}) {
    Ends e(scheme);
    Random random(5);
    RecordingInbox inbox;
    const Message large = random_message(random, 10, {std::size_t{24} << 20, 100});
    Outgoing first = large.outgoing();
    CHECK(e.a->is_large(first));
    while (e.a->send(first) == SendState::kBlocked && writable(*e.a, 20)) {
    }
    for (int i = 0; i < 10; ++i) {
      const Message small = random_message(random, 10, {1, 30'000}, 5);
      Outgoing second = small.outgoing();
      CHECK(std::string(scheme) == "lanes" || !e.a->is_large(second));
      while (e.a->send_between(second) == SendState::kBlocked) {
        wait_for_either(*e.a, *e.b);
        receive(*e.b, inbox, 64 << 10);
        RecordingInbox none;
        receive(*e.a, none, kAnyBudget);  // answers to offers
      }
      receive_until(*e.b, inbox, 1);
      check_same(small, inbox.messages[0]);
      inbox.messages.clear();
      e.a->send(first);
    }
    send_whole(*e.a, first, *e.b, inbox);
    receive_until(*e.b, inbox, 1);
    check_same(large, inbox.messages[0]);
  }
}

/// After a large message on a lane, the first connection blocks again.
CASE(a_message_without_segments_waits_for_the_first_connection) {
  Raw r;
  const std::string content(8 << 20, 'x');
  Message m;
  m.segments = {content};
  Outgoing large = m.outgoing();
  std::string read(1 << 20, ' ');
  const auto discard = [&](const UniqueFd& from) {
    while (::recv(from.get(), read.data(), read.size(), MSG_DONTWAIT) > 0) {
    }
  };
  while (r.link->send(large) == SendState::kBlocked) {
    discard(r.lane);
    discard(r.first);
  }
  m = {};
  m.body = content;
  Outgoing text = m.outgoing();
  CHECK(r.link->send(text) == SendState::kBlocked);
  CHECK(r.link->waits_for_fd());
}

CASE(data_on_lanes_is_read_after_the_end_of_the_first_connection) {
  Raw r;
  r.write(r.first, frame(1, {4}));
  r.first = UniqueFd();
  for (int i = 0; i < 3; ++i) CHECK(r.receive() == ReceiveState::kIdle);
  r.write(r.lane, fragment(0, 0, "abcd"));
  while (r.receive() != ReceiveState::kBroken) readable(*r.link);
  CHECK_EQ(r.link->error().text, "");
  CHECK_EQ(r.link->error().code, 0);
  CHECK_EQ(r.inbox.messages.size(), 1u);
  CHECK_EQ(text(r.inbox.messages[0].segments[0]), "abcd");
}

CASE(the_reset_of_a_lane_is_the_reason_of_the_link) {
  Raw r;
  Message m;
  m.segments = {std::string(1 << 20, 'x')};
  Outgoing large = m.outgoing();
  r.link->send(large);  // over the lane
  r.lane = UniqueFd();  // with unread bytes
  CHECK(r.receive() == ReceiveState::kIdle);
  char byte;
  while (::recv(r.first.get(), &byte, 1, 0) > 0) {
  }
  r.first = UniqueFd();
  CHECK(r.receive() == ReceiveState::kBroken);
  CHECK_SAYS(r.link->error().text, "a lane broke: ");
  CHECK_EQ(r.link->error().code, ECONNRESET);
}

void check_refused(const std::string& first, const std::string& lane, const std::string& why) {
  Raw r;
  r.link->set_limits({.message = 1 << 20});
  if (!first.empty()) r.write(r.first, first);
  if (!lane.empty()) r.write(r.lane, lane);
  for (int turn = 0; r.receive() != ReceiveState::kBroken; ++turn) {
    CHECK(turn < 1000);  // the fragments are accepted
    // A malformed fragment ends the sending direction; the other end, which is the test, closes the rest.
    char byte;
    if (::recv(r.first.get(), &byte, 1, MSG_DONTWAIT) == 0) r.first = UniqueFd();
  }
  CHECK_SAYS(r.link->error().text, why);
  CHECK_EQ(r.link->error().code, EPROTO);
  CHECK(r.inbox.messages.empty());
}

CASE(malformed_fragments) {
  const std::string four = frame(1, {4});
  for (const bool over_lane : {false, true}) {
    auto refused = [&](const std::string& buffers, const std::string& why) {
      check_refused(over_lane ? four : four + buffers, over_lane ? buffers : "", why);
    };
    refused(fragment(0, 0, "abcde"), "belongs to no message");    // too long
    refused(fragment(0, 2, "abc"), "belongs to no message");      // over the end
    refused(fragment(0, 1 << 20, "a"), "belongs to no message");  // far beyond
    refused(fragment(0, UINT64_MAX, "a"), "belongs to no message");
    refused(fragment(0, 0, "abc") + fragment(0, 1, "bcd"), "belongs to no message");  // more than there is
    refused(fragment(5000, 0, "a"), "belongs to no message");                         // of a message far ahead
    refused(fragment(0, 0, ""), "belongs to no message");
  }
  const std::string large = fragment(0, 0, std::string(kMaxFragment + 1, 'x')).substr(0, 100);
  check_refused(frame(1, {1 << 20}) + large, "", "belongs to no message");
  check_refused("", large, "belongs to no message");
  check_refused(frame(1, {2, 2}) + fragment(0, 1, "bc"), "", "belongs to no message");  // over two segments
  check_refused(frame(1, {4}, kFragmented + 1), "", "not been shared");
  std::string too_many;  // messages that begin and get no fragments
  for (std::uint64_t announced = 0; announced <= kMaxMissing + (1 << 20); announced += 1 << 20) {
    too_many += frame(1, {1 << 20});
  }
  check_refused(too_many + frame(1, {1}), "", "not been shared");
  FrameHeader bare;
  bare.type = FrameType::kFragment;
  check_refused(raw(bare), "", "do not fit");
  check_refused("",
                fragment(0, 3, "ab") +
                    std::string("GET / HTTP/1.1\r\nHost: localhost and some more of it, and yet more of it\r\n"),
                "not a Telegrad frame");
}

/// The frame of a message on a lane would mix with those on the first connection.
CASE(a_lane_carries_fragments_only) {
  check_refused(frame(1, {2}), small(FrameType::kRequest, 2), "do not fit");
  check_refused(frame(1, {2}), frame(2, {4}).substr(0, sizeof(FrameHeader) + sizeof(SegmentHeader)), "not been shared");
}

/// Two messages that are each within the limits may be incomplete at the same time.
CASE(messages_at_the_limit_follow_each_other) {
  Raw r;
  r.link->set_limits({.message = 4});
  r.write(r.first, frame(1, {4}) + frame(2, {3}));
  r.write(r.lane, fragment(1, 0, "efg") + fragment(0, 0, "abcd"));
  receive_until(*r.link, r.inbox, 2);
  CHECK_EQ(text(r.inbox.messages[0].segments[0]), "abcd");
  CHECK_EQ(text(r.inbox.messages[1].segments[0]), "efg");
}

/// No memory for an early fragment, or for its message when the frame arrives: the bytes are discarded.
CASE(fragments_without_memory) {
  const std::string large(100'000, 'x');
  for (const bool early : {true, false}) {
    Raw r;
    r.inbox.refuse_from = early ? large.size() : 2 * large.size();
    const auto send_frame = [&] { r.write(r.first, frame(1, {2 * large.size()}) + frame(2, {2})); };
    if (!early) send_frame();
    if (!early) CHECK(r.receive() == ReceiveState::kIdle);
    r.write(r.lane, fragment(0, 0, large));
    if (early) CHECK(r.receive() == ReceiveState::kIdle);
    r.inbox.refuse_from = SIZE_MAX;
    if (early) send_frame();
    r.write(r.first, fragment(0, large.size(), large) + fragment(1, 0, "cd"));
    receive_until(*r.link, r.inbox, 2);
    CHECK_EQ(r.inbox.messages[0].discarded, 2 * large.size());
    CHECK(r.inbox.messages[0].segments.empty());
    CHECK_EQ(r.inbox.messages[1].discarded, 0u);
    CHECK_EQ(text(r.inbox.messages[1].segments[0]), "cd");
  }
}

CASE(fragments_of_missing_messages_are_limited) {
  Raw r;
  const std::string one = fragment(1, 0, std::string(100 << 10, 'x'));
  for (std::size_t sent = 0; r.receive() != ReceiveState::kBroken; sent += one.size()) {
    CHECK(sent < 70 << 20);
    r.write(r.first, one);
  }
  CHECK_SAYS(r.link->error().text, "do not fit");
}

CASE(a_closed_lane_ends_the_link_with_a_reason) {
  for (const bool middle : {false, true}) {
    Ends e("lanes");
    RecordingInbox at_a, at_b;
    Random random(1);
    const Message m = random_message(random, 10, {40 << 20});
    Outgoing out = m.outgoing();
    if (middle) CHECK(e.a->send(out) == SendState::kBlocked);
    const std::vector<int> all = e.a->descriptors();
    CHECK_EQ(all.size(), 5u);  // the first connection, the epoll, three lanes
    ::shutdown(all.back(), SHUT_RDWR);
    std::thread other([&] {
      receive_until_broken(*e.b, at_b);
      e.b->close();
    });
    receive_until_broken(*e.a, at_a);
    e.a->close();
    other.join();
    CHECK_SAYS(e.a->error().text + e.b->error().text,
               "lane");  // the second end to notice may see only the end of stream
    CHECK(at_b.messages.empty());
    Outgoing again = m.outgoing();
    if (!middle) CHECK(e.a->send(again) == SendState::kBroken);
  }
}

/// A sender that stops waiting has the unsent bytes copied, wherever their fragments are.
CASE(memory_that_is_copied_while_it_is_sent) {
  for (const std::size_t body : {std::size_t{10}, 2 * kFlatFrame}) {
    Ends e("lanes");
    RecordingInbox inbox;
    Random random(2);
    Message m = random_message(random, body, {1000, 12 << 20, 12 << 20});
    const Message original = m;
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kBlocked);
    copy_payload(out);
    for (auto& s : m.segments) std::ranges::fill(s, 'x');
    while (e.a->send(out) == SendState::kBlocked) {
      wait_for_either(*e.a, *e.b);
      receive(*e.b, inbox, kAnyBudget);
    }
    receive_until(*e.b, inbox, 1);
    check_same(original, inbox.messages[0]);
  }
}

/// Every connection is prepared before a large transfer.
CASE(every_lane_is_prepared_for_large_transfers) {
  static std::set<int> ready;
  static constexpr SocketKind kKind{.peer_credentials = remote_credentials,
                                    .before_large = [](int fd) { CHECK(ready.insert(fd).second); }};
  std::set<int> all;
  std::vector<UniqueFd> others;
  std::unique_ptr<LanedLink> link;
  for (int i = 0; i < 3; ++i) {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    others.emplace_back(ends[0]);
    all.insert(ends[1]);
    auto one =
        std::make_unique<LanedLink>(std::make_unique<ByteStream>(UniqueFd(ends[1])), "test", false, kKind,
                                    Striping{.sizes = {.message = 1, .segment = 1}, .striped = 1, .measured = false});
    if (link) {
      CHECK(link->add_lane(std::move(one)));
    } else {
      link = std::move(one);
    }
  }
  Random random(3);
  const Message small = random_message(random, 100), large = random_message(random, 10, {4 << 20});
  Outgoing first = small.outgoing(), second = large.outgoing();
  CHECK(link->send(first) == SendState::kSent);
  CHECK(ready.empty());
  CHECK(link->send(second) == SendState::kBlocked);  // the other end does not read
  CHECK(ready == all);
}

CASE(a_link_accepts_only_valid_lanes) {
  Ends one("tcp"), other("tcp"), unix("unix"), closed("tcp");
  closed.a->close();
  CHECK(!unix.a->add_lane(std::move(unix.b)));
  CHECK(!one.a->add_lane(std::move(unix.a)));
  CHECK(!closed.a->add_lane(std::move(other.a)));
  CHECK_EQ(one.a->lanes_fd(), -1);
}

// ---- use of lanes

/// Returns how many of `messages` messages use lanes that are `gain` times as fast as the first connection.
int uses_of_lanes(LaneSpeeds& speeds, int gain, int messages) {
  int uses = 0;
  for (int i = 0; i < messages; ++i) {
    const bool lanes = speeds.next_uses_lanes();
    uses += lanes;
    speeds.record(lanes, 4'000'000, lanes ? 4'000'000 / gain : 4'000'000);
  }
  return uses;
}

CASE(lanes_are_used_while_they_are_faster) {
  LaneSpeeds speeds;
  CHECK_EQ(uses_of_lanes(speeds, 1, 1000), 3 + 8);  // three at first, and rare trials
  CHECK(uses_of_lanes(speeds, 4, 1000) > 700);      // noticed by a trial
  CHECK(uses_of_lanes(speeds, 1, 1000) < 16);
}

}  // namespace
}  // namespace telegrad::test

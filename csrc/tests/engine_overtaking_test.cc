// Messages that overtake a large one: what a peer receives that begins to read after all have been sent.
#include <algorithm>
#include <thread>

#include "tests/workers.h"
#include "transports/tcp/delivery.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kLargeSize = std::size_t{40} << 20;  // more than sockets and rings hold
constexpr std::size_t kSmallSize = 50 << 10;               // copied until it is acknowledged

const std::string kLarge = [] { return Random(1).bytes(kLargeSize); }();

/// A worker, and a peer that reads only when the test does.
struct Stage {
  explicit Stage(const std::string& scheme, const Settings& settings = Worker::settings_of(0))
      : a(0, settings), p(1, scheme) {
    p.config.resume = settings.handshake.resume;
    a.engine->set_peer(p.address());
    start(99);
    p.accept();
    p.reply(p.receive(), "");
    a.completion_count.wait_for(1);
  }

  /// Starts a request that is copied if it cannot be sent at once.
  std::uint64_t start(int target, const std::string& segment = {}, std::uint32_t name = 0) {
    Request r{.never_wait = true, .name_id = name, .name = name ? "a function" : ""};
    if (!segment.empty()) r.segments = {segment};
    return a.start(1, target, std::move(r));
  }
  std::uint64_t start_large(std::uint32_t name = 0) { return start(next_large++, kLarge, name); }
  void send_oneway(const std::string& segment = {}) {
    Request r;
    if (!segment.empty()) r.segments = {segment};
    a.engine->send(1, compose(r));
  }
  /// Sends a request to the worker, and waits until its handler runs.
  void hold_request() {
    Message m;
    m.header.type = FrameType::kRequest;
    m.header.tag = kHold;
    m.header.call_id = 1000;
    p.send(m);
    a.handled.wait_for(1);
  }
  /// Receives up to the next large message, which is moved to `large`. Returns those before it. A slow worker may ping.
  std::vector<Incoming> before_large() {
    std::vector<Incoming> found;
    while (true) {
      Incoming m = p.receive();
      if (!m.segments.empty() && m.segments[0]->size() == kLargeSize) {
        CHECK(text_of(m.segments[0]) == kLarge);
        large = std::move(m);
        return found;
      }
      if (m.header.type != FrameType::kPing) found.push_back(std::move(m));
    }
  }
  Worker a;
  Puppet p;
  Incoming large;
  int next_large = 100;
};

/// Runs a test on links that send large messages in parts.
void on_links(const std::string& scheme, const std::function<void(Stage&)>& test) {
  if (scheme == "inproc") return;
  Stage s(scheme);
  test(s);
}

CASE_ON_EVERY_SCHEME(small_requests_overtake_a_large_one) {
  on_links(scheme, [](Stage& s) {
    s.start_large(7);
    std::vector<std::uint64_t> calls;
    for (int i = 1; i <= 20; ++i) calls.push_back(s.start(i, i == 10 ? std::string(100 << 10, 'x') : "", 7));
    const std::vector<Incoming> found = s.before_large();
    CHECK_EQ(found.size(), calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) CHECK_EQ(found[i].header.call_id, calls[i]);
    // Each message that may be the first to be delivered defines the name.
    CHECK_EQ(found[0].name_view(), "a function");
    CHECK_EQ(found[1].name_view(), "");
    CHECK_EQ(s.large.name_view(), "a function");
  });
}

CASE_ON_EVERY_SCHEME(replies_and_signs_of_life_overtake) {
  on_links(scheme, [](Stage& s) {
    s.start_large();
    s.hold_request();
    Message ping;
    ping.header.type = FrameType::kPing;
    s.p.send(ping);
    s.a.release.set();
    const std::vector<Incoming> found = s.before_large();
    CHECK_EQ(found.size(), 2u);
    for (const Incoming& m : found) CHECK(m.header.type == FrameType::kReply || m.header.type == FrameType::kPong);
  });
}

CASE_ON_EVERY_SCHEME(large_messages_keep_their_order) {
  on_links(scheme, [](Stage& s) {
    const std::uint64_t first = s.start_large(), second = s.start_large();
    const std::uint64_t small = s.start(1);
    CHECK_EQ(s.before_large().size(), 1u);
    CHECK_EQ(s.large.header.call_id, first);
    CHECK_EQ(s.before_large().size(), 0u);
    CHECK_EQ(s.large.header.call_id, second);
    CHECK(small > second);
  });
}

/// A large message is delivered late, so another one reports the credit.
CASE_ON_EVERY_SCHEME(a_large_message_carries_no_credit) {
  on_links(scheme, [](Stage& s) {
    s.hold_request();  // too small for a credit frame
    s.start_large();
    s.start(1);
    const std::vector<Incoming> found = s.before_large();
    CHECK_EQ(s.large.header.credit, 0u);
    CHECK_EQ(found.size(), 1u);
    CHECK(found[0].header.credit > 0);
  });
}

/// The bytes of a large message do not count against the small ones that pass it, until it has been sent.
CASE_ON_EVERY_SCHEME(small_requests_pass_a_window_that_a_large_one_fills) {
  if (scheme == "inproc") return;
  Settings settings = Worker::settings_of(0);
  settings.window = 1 << 20;
  Stage s(scheme, settings);
  s.start_large();
  CHECK(s.a.engine->may_send_now(1, 100));
  CHECK(!s.a.engine->may_send_now(1, 1 << 20));
  s.start(1);
  CHECK_EQ(s.before_large().size(), 1u);
  while (s.a.engine->may_send_now(1, 100)) std::this_thread::yield();
}

CASE_ON_EVERY_SCHEME(a_cancel_waits_for_its_own_request) {
  on_links(scheme, [](Stage& s) {
    const std::uint64_t large = s.start_large(), small = s.start(1);
    WorkItem taken;
    CHECK(s.a.engine->cancel(large, taken));
    CHECK(s.a.engine->cancel(small, taken));
    const std::vector<Incoming> found = s.before_large();
    CHECK_EQ(found.size(), 2u);
    CHECK(found[0].header.type == FrameType::kRequest);
    CHECK(found[1].header.type == FrameType::kCancel);
    CHECK_EQ(found[1].header.call_id, small);
    const Incoming last = s.p.receive();
    CHECK(last.header.type == FrameType::kCancel);
    CHECK_EQ(last.header.call_id, large);
  });
}

CASE_ON_EVERY_SCHEME(one_way_messages_keep_their_order) {
  on_links(scheme, [](Stage& s) {
    s.start_large();
    s.send_oneway();
    CHECK_EQ(s.before_large().size(), 1u);
    s.send_oneway(kLarge);
    s.send_oneway();
    s.start(1);
    const std::vector<Incoming> found = s.before_large();
    CHECK(s.large.header.type == FrameType::kOneway);
    CHECK_EQ(found.size(), 1u);
    CHECK(found[0].header.type == FrameType::kRequest);
    CHECK(s.p.receive().header.type == FrameType::kOneway);
  });
}

CASE_ON_EVERY_SCHEME(a_goodbye_overtakes_nothing) {
  on_links(scheme, [](Stage& s) {
    s.start_large();
    s.start(1);
    std::thread stop([&] { s.a.stop(5 * kSecond); });
    RecordingInbox inbox;
    receive_until_broken(*s.p.link, inbox);
    stop.join();
    const auto is_large = [](const Incoming& m) { return !m.segments.empty(); };
    CHECK_EQ(std::ranges::count_if(inbox.messages, is_large), 1);
    CHECK(inbox.messages.back().header.type == FrameType::kGoodbye);
  });
}

/// The link breaks while a large message is in progress and others wait: all memory is released.
CASE_ON_EVERY_SCHEME(an_end_in_the_middle) {
  on_links(scheme, [](Stage& s) {
    s.start_large();
    s.start(1);
    s.p.link->close();
    s.p.link.reset();
    s.a.completion_count.wait_for(3);
    std::lock_guard lock(s.a.mutex);
    for (const int target : {1, 100}) CHECK(s.a.completions.at(target).status == CallStatus::kPeerLost);
  });
}

/// A peer that acknowledges nothing leaves no room for small messages, and gets the large one nevertheless.
CASE(a_large_message_is_completed_without_acknowledgements) {
  Settings settings = Worker::settings_of(0);
  settings.handshake.resume = true;
  Stage s("tcp", settings);
  s.start_large();
  const std::string small(kSmallSize, 'x');
  constexpr int kSmall = 2 * static_cast<int>(kMaxUnacknowledged / kSmallSize);
  for (int i = 0; i < kSmall; ++i) s.start(1000 + i, small);
  CHECK(s.before_large().size() < kSmall);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

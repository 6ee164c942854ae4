// The window of replies: the requests of a peer that does not read its replies wait.
#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kMiB = 1 << 20;

/// A worker with a window that answers each call with many bytes, and a puppet that calls it.
struct Stage {
  Stage(const std::string& scheme, std::size_t window, std::size_t reply) : b(1, settings_of(window)), p(0, scheme) {
    b.listen(scheme);
    b.on_custom = [this, reply](WorkItem& item) {
      ran.add();
      b.answer(item, "", {std::string(reply, 'x')});
    };
    p.connect(b.address());
  }

  static Settings settings_of(std::size_t window) {
    Settings s;
    s.handshake.me.id = -1;
    s.window = static_cast<std::int64_t>(window);
    return s;
  }

  void ask(std::uint64_t call, std::uint16_t flags = 0) {
    Message request = message(FrameType::kRequest, "", call);
    request.header.tag = kCustom;
    request.header.flags = flags;
    p.send(request);
  }

  void wait_for_requests(std::uint64_t count) {
    while (b.engine->stats().requests < count) std::this_thread::yield();
  }
  /// Waits until no handler runs and none waits for the puppet.
  void wait_for_handlers() {
    while (b.engine->stats().running_handlers > 0) std::this_thread::yield();
  }
  std::size_t queued() { return b.engine->stats().queued_requests; }

  Counter ran;
  Worker b;
  Puppet p;
};

/// A caller that does not read gets no more replies made for it than its window; once it reads, all arrive. Others are
/// served meanwhile.
CASE_ON_EVERY_SCHEME(requests_of_a_caller_that_reads_no_replies_are_held) {
  constexpr int kCalls = 64;
  Stage s(scheme, 4 * kMiB, kMiB);
  for (std::uint64_t call = 1; call <= kCalls; ++call) s.ask(call);
  s.wait_for_requests(kCalls);
  Worker other(2);
  other.meet(s.b);
  for (int i = 0; i < 20; ++i) CHECK_EQ(body_of(other.call(1, {.body = "y"})), "y");
  s.wait_for_handlers();
  CHECK(s.ran.value() < kCalls / 2);
  CHECK(s.queued() > 0);
  for (int i = 0; i < kCalls; ++i) CHECK_EQ(s.p.receive().segments.at(0)->size(), kMiB);
  CHECK_EQ(s.ran.value(), kCalls);
  CHECK_EQ(s.queued(), 0u);
}

/// The unsent rest of a reply is copied while the peer does not read, which makes the message smaller. Its bytes no
/// longer count once it is sent.
CASE(a_reply_that_was_copied_while_it_waited_is_counted_once) {
  Stage s("unix", 64 << 10, 8 * kMiB);
  for (std::uint64_t call = 1; call <= 3; ++call) {
    s.ask(call);
    s.ran.wait_for(static_cast<int>(call));
    s.wait_for_handlers();
    CHECK_EQ(s.p.receive().segments.at(0)->size(), 8 * kMiB);
  }
}

/// Messages overtake a large reply, so its bytes hold no requests. Its handler ends although the peer does not read.
CASE_ON_EVERY_SCHEME(requests_run_while_a_large_reply_is_sent) {
  if (scheme == "inproc") return;
  constexpr std::size_t kLargeReply = 40 * kMiB;
  Stage s(scheme, 4 * kMiB, kLargeReply);
  for (std::uint64_t call = 1; call <= 2; ++call) {
    s.ask(call);
    s.ran.wait_for(static_cast<int>(call));
    s.wait_for_handlers();
  }
  for (int i = 0; i < 2; ++i) {
    Incoming m = s.p.receive();
    while (m.header.type == FrameType::kPing) m = s.p.receive();  // the worker is slow
    CHECK_EQ(m.segments.at(0)->size(), kLargeReply);
  }
}

/// The requests of a caller that has gone are not held forever.
CASE(held_requests_of_a_lost_caller_end) {
  constexpr int kCalls = 16;
  Stage s("unix", kMiB, kMiB);
  for (std::uint64_t call = 1; call <= kCalls; ++call) s.ask(call, call % 2 ? kMustRun : 0);
  s.wait_for_requests(kCalls);
  s.wait_for_handlers();
  CHECK(s.queued() > 0);
  s.p.link->close();
  s.b.wait_for_event(EventKind::kPeerLost);
  while (s.queued() > 0) std::this_thread::yield();
  s.wait_for_handlers();
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

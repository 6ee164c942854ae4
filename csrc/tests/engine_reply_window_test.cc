// The window of replies: the requests of a peer that does not read its replies wait.
#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// A caller that does not read gets no more replies made for it than its window; once it reads, all arrive in order of
/// its requests. Others are served meanwhile.
CASE_ON_EVERY_SCHEME(requests_of_a_caller_that_reads_no_replies_are_held) {
  constexpr int kCalls = 64;
  Settings s;
  s.handshake.me.id = -1;
  s.window = 4 << 20;
  Worker b(1, s, 2);
  b.listen(scheme);
  Counter ran;
  b.on_custom = [&](WorkItem& item) {
    ran.add();
    b.answer(item, std::string(item.message.body_view()), {std::string(1 << 20, 'x')});
  };
  Puppet p(0, scheme);
  p.connect(b.address());
  for (int i = 0; i < kCalls; ++i) {
    Message request = message(FrameType::kRequest, std::to_string(i), static_cast<std::uint64_t>(i + 1));
    request.header.tag = kCustom;
    p.send(request);
  }
  while (b.engine->stats().requests < kCalls) std::this_thread::yield();
  Worker other(2);
  other.meet(b);
  for (int i = 0; i < 20; ++i) CHECK_EQ(body_of(other.call(1, {.body = "y"})), "y");
  while (b.engine->stats().running_handlers > 0) std::this_thread::yield();
  CHECK(ran.value() < kCalls / 2);
  CHECK(b.engine->stats().queued_requests > 0);
  for (int i = 0; i < kCalls; ++i) CHECK_EQ(p.receive().segments.at(0)->size(), std::size_t{1} << 20);
  CHECK_EQ(ran.value(), kCalls);
  CHECK_EQ(b.engine->stats().queued_requests, 0u);
}

/// The unsent rest of a reply is copied while the peer does not read, which makes the message smaller. Its bytes no
/// longer count once it is sent.
CASE(a_reply_that_was_copied_while_it_waited_is_counted_once) {
  Settings s;
  s.handshake.me.id = -1;
  s.window = 64 << 10;
  Worker b(1, s, 2);
  b.listen("unix");
  Counter ran;
  b.on_custom = [&](WorkItem& item) {
    ran.add();
    b.answer(item, "", {std::string(8 << 20, 'x')});
  };
  Puppet p(0);
  p.connect(b.address());
  for (std::uint64_t call = 1; call <= 3; ++call) {
    Message request = message(FrameType::kRequest, "", call);
    request.header.tag = kCustom;
    p.send(request);
    ran.wait_for(static_cast<int>(call));
    while (b.engine->stats().running_handlers > 0) std::this_thread::yield();  // it has stopped waiting for the peer
    CHECK_EQ(p.receive().segments.at(0)->size(), std::size_t{8} << 20);
  }
}

/// The requests of a caller that has gone are not held forever.
CASE(held_requests_of_a_lost_caller_end) {
  Settings s;
  s.handshake.me.id = -1;
  s.window = 1 << 20;
  Worker b(1, s, 2);
  b.listen("unix");
  b.on_custom = [&](WorkItem& item) { b.answer(item, "", {std::string(1 << 20, 'x')}); };
  Puppet p(0);
  p.connect(b.address());
  for (std::uint64_t i = 1; i <= 16; ++i) {
    Message request = message(FrameType::kRequest, "", i);
    request.header.tag = kCustom;
    request.header.flags = i % 2 ? kMustRun : 0;
    p.send(request);
  }
  while (b.engine->stats().requests < 16 || b.engine->stats().running_handlers > 0) std::this_thread::yield();
  CHECK(b.engine->stats().queued_requests > 0);
  p.link->close();
  b.wait_for_event(EventKind::kPeerLost);
  while (b.engine->stats().queued_requests > 0 || b.engine->stats().running_handlers > 0) std::this_thread::yield();
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

// What a timeout says about the state of its call.
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings one_handler() {
  Settings s;
  s.handlers = 1;
  return s;
}

/// A worker with threads and a puppet at the other end: callee or caller.
struct WithPuppet {
  explicit WithPuppet(bool connects) : a(0, one_handler()), p(1) {
    if (connects) {
      a.listen("unix");
      p.connect(a.address());
    } else {
      a.engine->set_peer(p.address());
      std::thread puppet([&] { p.accept(); });
      a.start(1, 0, {});
      puppet.join();
      p.reply(p.receive(), "hello");
      a.completion_count.wait_for(1);
    }
  }
  Incoming expect(FrameType type) {
    Incoming m = p.receive();
    CHECK(m.header.type == type);
    return m;
  }
  void send(FrameType type, std::uint64_t call, std::uint8_t tag, std::string body = {}) {
    Message m = message(type, std::move(body), call);
    m.header.tag = tag;
    p.send(m);
  }
  Worker a;
  Puppet p;
};

CASE(the_callee_reports_each_state) {
  WithPuppet s(true);
  const auto state_of = [&](std::uint64_t call) {
    s.send(FrameType::kCancel, call, static_cast<std::uint8_t>(CancelReason::kExpired));
    Incoming m = s.p.receive();
    while (m.header.type != FrameType::kCallState) m = s.p.receive();  // replies of canceled requests
    CHECK_EQ(m.header.call_id, call);
    return static_cast<CallState>(m.header.tag);
  };
  s.send(FrameType::kRequest, 7, kHold);
  s.a.handled.wait_for(1);
  s.send(FrameType::kRequest, 8, kEcho, "queued");
  CHECK(state_of(8) == CallState::kQueued);
  CHECK(state_of(7) == CallState::kRunning);
  s.a.release.set();
  while (s.p.receive().header.call_id != 7) {
  }
  CHECK(state_of(7) == CallState::kReplied);
  CHECK(state_of(1234) == CallState::kReplied);  // it never existed
  s.send(FrameType::kCancel, 7, static_cast<std::uint8_t>(CancelReason::kCanceled));
  s.send(FrameType::kCancel, 0, 200);
  s.send(FrameType::kRequest, 9, kEcho, "still here");
  Incoming reply = s.p.receive();
  while (reply.header.call_id != 9) reply = s.p.receive();  // that of the canceled request may come late
  CHECK_EQ(std::string(reply.body_view()), "still here");
}

CASE(without_an_answer_the_state_is_unknown) {
  WithPuppet s(false);
  const Nanos start = now();
  std::thread puppet([&] {
    const Incoming request = s.expect(FrameType::kRequest);
    const Incoming cancel = s.expect(FrameType::kCancel);
    CHECK_EQ(cancel.header.call_id, request.header.call_id);
    CHECK_EQ(cancel.header.tag, static_cast<std::uint8_t>(CancelReason::kExpired));
  });
  const Completion o = s.a.call(1, {.timeout = 5 * kMillisecond});
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "unknown");
  CHECK(now() - start >= 25 * kMillisecond);
  puppet.join();
  s.a.start(1, 1, {.timeout = 5 * kMillisecond});
  s.a.completion_count.wait_for(2);
  CHECK_EQ(s.a.completions.at(1).why, "unknown");
}

/// The deadline passes between the choice of the connection and the send, while the request is copied.
CASE(a_cancellation_does_not_overtake_its_request) {
  WithPuppet s(false);
  s.a.start(1, 1, {.segments = {std::string(64 * kMiB, 'x')}, .timeout = 1, .never_wait = true});
  const Incoming request = s.expect(FrameType::kRequest);
  CHECK_EQ(s.expect(FrameType::kCancel).header.call_id, request.header.call_id);
  s.send(FrameType::kCallState, request.header.call_id, static_cast<std::uint8_t>(CallState::kQueued));
  s.a.completion_count.wait_for(2);
  CHECK(s.a.completions.at(1).status == CallStatus::kTimedOut);
}

CASE(a_state_that_does_not_exist_is_unknown) {
  WithPuppet s(false);
  s.a.start(1, 1, {.timeout = 5 * kMillisecond});
  s.expect(FrameType::kRequest);
  const std::uint64_t call = s.expect(FrameType::kCancel).header.call_id;
  s.send(FrameType::kCallState, call + 1, 1);  // of no call
  s.send(FrameType::kCallState, call, 99);
  s.a.completion_count.wait_for(2);
  CHECK_EQ(s.a.completions.at(1).why, "unknown");
  s.send(FrameType::kCallState, call, 3);  // too late
}

/// The caller may notice later than its callee that the deadline has passed.
CASE(a_reply_that_the_deadline_has_passed_is_a_timeout) {
  WithPuppet s(false);
  s.a.start(1, 1, {.body = "x"});
  s.p.reply(s.expect(FrameType::kRequest), "E", kLeftOut | kMustDeliver);
  s.a.completion_count.wait_for(3);  // with the reply, which must be processed
  CHECK(s.a.completions.at(1).status == CallStatus::kTimedOut);
  CHECK_EQ(s.a.completions.at(1).why, "queued");
  CHECK_EQ(body_of(s.a.orphans.at(0)), "E");
}

/// Requests that are canceled together are answered at once, by threads that have just run nested ones.
CASE_ON_EVERY_SCHEME(a_reply_does_not_overtake_the_state_of_its_request) {
  Worker a(0), b(1, one_handler(), 4), c(2);
  introduce({&a, &b, &c}, scheme);
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  std::atomic<bool> ended = false;
  std::thread other([&] {
    for (int i = 0; !ended; ++i) {
      c.start(1, i, {.nested = true});
      if (i % 20 == 0) c.call(1, {.nested = true});
    }
  });
  constexpr int kCalls = 1000;
  const Nanos deadline = now() + 100 * kMillisecond;
  for (int i = 1; i <= kCalls; ++i)
    a.start(1, i, {.body = "x", .timeout = std::max<Nanos>(deadline - now(), 1), .never_wait = true});
  a.completion_count.wait_for(kCalls);
  ended = true;
  other.join();
  b.release.set();
  std::lock_guard lock(a.mutex);
  for (int i = 1; i <= kCalls; ++i) CHECK(a.completions.at(i).why != "reply lost");
}

CASE(a_reply_after_the_deadline_is_a_lost_reply) {
  WithPuppet s(false);
  std::thread puppet([&] {
    const Incoming request = s.expect(FrameType::kRequest);
    s.expect(FrameType::kCancel);
    s.p.reply(request, "late", kMustDeliver);
  });
  const Completion o = s.a.call(1, {.timeout = 5 * kMillisecond});
  puppet.join();
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "reply lost");
  s.a.completion_count.wait_for(2);
  CHECK_EQ(body_of(s.a.orphans.at(0)), "late");  // its references are processed
}

}  // namespace
}  // namespace telegrad::test

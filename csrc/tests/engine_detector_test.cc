// The failure detector of an engine: silent peers are lost, slow and busy ones are not.
#include <sys/socket.h>

#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings with_heartbeat(Nanos interval) {
  Settings s;
  s.handshake.me.id = -1;
  s.heartbeat = s.local_heartbeat = interval;
  return s;
}

CASE_ON_EVERY_SCHEME(a_silent_peer_is_lost) {
  const Nanos interval = 80 * kMillisecond;
  Worker a(0, with_heartbeat(interval));
  Puppet p(1, scheme);
  a.engine->set_peer(p.address());
  Completion completion;
  Nanos ended = 0;
  std::thread caller([&] {
    completion = a.call(1, {.body = "x"});  // without a deadline
    ended = now();
  });
  p.accept();
  CHECK(p.receive().header.type == FrameType::kRequest);
  const Nanos silent_since = now();
  CHECK(p.receive().header.type == FrameType::kPing);
  CHECK(p.receive().header.type == FrameType::kPing);
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK_SAYS(completion.why, "no sign of life");
  CHECK_SAYS(completion.why, "heartbeat: 0.08 s");
  CHECK(ended - silent_since >= 2 * interval);
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "no sign of life");
}

/// The answers keep a call that takes many intervals alive.
CASE_ON_EVERY_SCHEME(a_peer_that_answers_is_not_lost) {
  Worker a(0, with_heartbeat(40 * kMillisecond));
  Puppet p(1, scheme);
  a.engine->set_peer(p.address());
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.body = "x"}); });
  p.accept();
  const Incoming request = p.receive();
  for (int i = 0; i < 12; ++i) {
    CHECK(p.receive().header.type == FrameType::kPing);
    p.send(message(FrameType::kPong));
  }
  p.reply(request, "at last");
  caller.join();
  CHECK_EQ(body_of(completion), "at last");
  CHECK_EQ(a.event_count.value(), 0);
}

/// User code has all threads of the callee, so only the timer thread reads its links.
CASE_ON_EVERY_SCHEME(a_busy_peer_is_not_lost) {
  Worker a(0, with_heartbeat(250 * kMillisecond)), b(1, with_heartbeat(0), 1);
  b.starts_threads = false;
  introduce({&a, &b}, scheme);
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.tag = kHold, .body = "x"}); });
  b.handled.wait_for(1);
  const std::uint64_t before = a.engine->stats().received_messages;
  while (a.engine->stats().received_messages < before + 8) std::this_thread::yield();  // answers
  b.release.set();
  caller.join();
  CHECK_EQ(body_of(completion), "x");
  CHECK_EQ(a.event_count.value(), 0);
}

/// A caller that checks for signals may wait for the GIL, which user code holds. It is not the leader meanwhile.
CASE_ON_EVERY_SCHEME(a_caller_that_waits_for_the_gil_does_not_lead) {
  Worker a(0, with_heartbeat(0), 0), b(1, with_heartbeat(250 * kMillisecond));
  introduce({&a, &b}, scheme);
  Event checks, may_go_on;
  std::thread caller([&] {
    Request call{.tag = kHold, .body = "x"};
    const std::uint64_t id = a.engine->start(1, compose(call), {});
    Completion completion;
    const auto interrupted = [&] {
      checks.set();
      may_go_on.wait();
      return false;
    };
    CHECK(a.engine->wait(id, kNever, interrupted, completion) == WaitEnd::kDone);
    CHECK_EQ(body_of(completion), "x");
  });
  checks.wait();
  const std::uint64_t before = b.engine->stats().received_messages;
  while (b.engine->stats().received_messages < before + 6) std::this_thread::yield();  // answers
  may_go_on.set();
  b.release.set();
  caller.join();
  CHECK_EQ(b.event_count.value(), 0);
}

/// A peer that reads a large message slowly, and sends nothing, is alive.
CASE(a_slow_reader_is_not_lost) {
  const Nanos interval = 150 * kMillisecond;
  Worker a(0, with_heartbeat(interval));
  Puppet p(1, "unix");
  a.engine->set_peer(p.address());
  const std::string large(32 << 20, 'x');
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.segments = {large}}); });
  p.accept();
  std::size_t read = 0;
  const Nanos end = now() + 6 * interval;
  std::vector<char> buffer(256 << 10);
  while (now() < end) {
    const ssize_t n = ::recv(p.link->fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n > 0) read += static_cast<std::size_t>(n);
    polls(-1, 0, 10);  // the pace of the reader
  }
  CHECK(read < large.size());
  CHECK_EQ(a.event_count.value(), 0);
  p.link->close();
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
}

/// Messages that must be delivered do not wait forever for a peer that accepts connections and never answers.
CASE(a_peer_that_never_answers_is_lost) {
  Settings s = with_heartbeat(40 * kMillisecond);
  s.connect_timeout = 30 * kMillisecond;
  Worker a(0, s);
  Puppet silent(1, "unix");  // its connections stay in the backlog
  a.engine->set_peer(silent.address());
  CHECK(a.call(1, {.flags = kMustDeliver}).status == CallStatus::kUnreachable);
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost),
             "within connect_timeout: it does not answer at " + silent.address().addresses.front());
}

}  // namespace
}  // namespace telegrad::test

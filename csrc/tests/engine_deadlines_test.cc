// Timeouts, late replies, and objects that are kept until a late reply.
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <thread>

#include "tests/workers.h"
#include "transports/frames.h"

namespace telegrad::test {
namespace {

std::unique_ptr<KeepAlive> sets_event(Event& gone) {
  return std::make_unique<Bytes>("", std::vector<std::string>{}, [&] { gone.set(); });
}

/// A worker without pool threads, and a puppet connected to it: only waiting threads read.
struct Stage {
  explicit Stage(Settings settings = {}) : a(0, std::move(settings), 0), p(1) { p.meet(a); }
  /// Makes the worker read all that the puppet has sent.
  void read_all() {
    const std::uint64_t call = a.start(1, -1, {.body = "sync"});
    Incoming m = p.receive();
    while (std::string(m.body_view()) != "sync") m = p.receive();
    p.reply(m, "synced");
    Completion o;
    CHECK(a.engine->wait(call, kNever, {}, o) == WaitEnd::kDone);
    CHECK_EQ(body_of(o), "synced");
  }
  Worker a;
  Puppet p;
};

CASE_ON_EVERY_SCHEME(a_call_times_out) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const Nanos start = now();
  CHECK(a.call(1, {.tag = kNoAnswer, .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
  CHECK(now() - start >= 5 * kMillisecond);
  for (int i = 0; i < 50; ++i) a.start(1, i, {.tag = kNoAnswer, .timeout = (50 - i) * kMillisecond / 10});
  a.completion_count.wait_for(50);
  for (int i = 0; i < 50; ++i) CHECK(a.completions.at(i).status == CallStatus::kTimedOut);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
  CHECK_EQ(body_of(a.call(1, {.body = "the link is well"})), "the link is well");
}

CASE(a_burst_is_sent_though_no_thread_polls_and_no_message_follows) {
  Stage s;
  for (int length = 1; length <= 60; ++length) {
    for (int n = 0; n < length; ++n) {
      s.a.start(1, n, {.tag = kNoAnswer, .body = std::to_string(n), .never_wait = true});
    }
    for (int n = 0; n < length; ++n) CHECK_EQ(std::string(s.p.receive().body_view()), std::to_string(n));
  }
}

CASE(a_deadline_in_the_past) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  CHECK(a.call(1, {.tag = kNoAnswer, .timeout = 1}).status == CallStatus::kTimedOut);
  a.start(1, 1, {.tag = kNoAnswer, .timeout = 1});
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(1).status == CallStatus::kTimedOut);
}

CASE(an_asynchronous_deadline_passes_while_a_caller_polls) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  std::thread caller([&] { a.call(1, {.tag = kHold}); });
  b.handled.wait_for(1);
  a.start(1, 1, {.tag = kNoAnswer, .timeout = kMillisecond});
  a.completion_count.wait_for(1);
  b.release.set();
  caller.join();
}

CASE(a_waiter_of_an_asynchronous_call_gets_its_timeout) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  for (int i = 0; i < 20; ++i) {
    const std::uint64_t call = a.start(1, i, {.tag = kNoAnswer, .timeout = 2 * kMillisecond});
    Completion o;
    const WaitEnd end = a.engine->wait(call, kNever, {}, o);
    CHECK(end == WaitEnd::kDone ? o.status == CallStatus::kTimedOut : a.completion_count.value() >= 0);
  }
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE(the_handler_gets_the_deadline) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  b.on_custom = [&](WorkItem& item) {
    const std::string left = item.deadline == kNever                ? "none"
                             : item.deadline - now() > 59 * kSecond ? "enough"
                                                                    : "less";
    b.answer(item, left);
  };
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom})), "none");
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .timeout = 60 * kSecond})), "enough");
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .timeout = 30 * kSecond})), "less");
}

constexpr Nanos kTimeout = 60 * kSecond, kDelay = 30 * kMillisecond;

/// The wait for the connection is part of the time of a request.
CASE(the_timeout_is_that_of_the_sending) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  std::thread caller([&] { CHECK_EQ(body_of(a.call(1, {.timeout = kTimeout})), "yes"); });
  readable(p.listener->fd());
  polls(-1, 0, kDelay / kMillisecond);
  p.accept();
  const Incoming request = p.receive();
  CHECK(request.header.timeout <= kTimeout - kDelay);
  CHECK(request.header.timeout > kTimeout / 2);
  p.reply(request, "yes");
  caller.join();
}

/// A request that waits behind others in the queue of its connection gets its timeout when its turn comes.
CASE(the_timeout_of_a_queued_request_is_that_of_its_sending) {
  Stage s;
  const std::string large(32 << 20, 'x');
  s.a.start(1, 1, {.segments = {large}, .timeout = kTimeout, .never_wait = true});
  const std::string second(1 << 20, 'x');  // a smaller request would overtake the first one
  s.a.start(1, 2, {.body = "behind", .segments = {second}, .timeout = kTimeout, .never_wait = true});
  polls(-1, 0, kDelay / kMillisecond);
  std::thread reader([&] { s.a.call(1, {.body = "last"}); });  // its thread sends the queue
  const Incoming last = s.p.receive();
  CHECK_EQ(std::string(last.body_view()), "last");
  CHECK_EQ(s.p.receive().segments.at(0)->size(), large.size());
  const Incoming behind = s.p.receive();
  CHECK_EQ(std::string(behind.body_view()), "behind");
  CHECK(behind.header.timeout <= kTimeout - kDelay);
  s.p.reply(last, "");
  reader.join();
}

/// The time in which the content of a request arrives is part of its time.
CASE(the_deadline_counts_from_the_header) {
  Worker a(0);
  a.listen("unix");
  Counter ran;
  Nanos left = 0;
  a.on_custom = [&](WorkItem& item) {
    left = item.deadline - now();
    ran.add();
  };
  Puppet p(1);
  p.connect(a.address());
  Message request = message(FrameType::kRequest, "", 1);
  request.header.tag = kCustom;
  request.header.timeout = kTimeout;
  request.segments = {std::string(100 << 10, 'x')};
  Outgoing out = request.outgoing();
  start_frame(out);
  const std::string head = std::string(reinterpret_cast<const char*>(&out.header), sizeof out.header) + out.prefix;
  CHECK(::send(p.link->fd(), head.data(), head.size(), 0) > 0);
  int unread = 1;
  while (ioctl(p.link->fd(), SIOCOUTQ, &unread) == 0 && unread > 0) std::this_thread::yield();
  polls(-1, 0, kDelay / kMillisecond);
  const std::string& content = request.segments[0];
  for (std::size_t sent = 0; sent < content.size();) {
    const ssize_t n = ::send(p.link->fd(), content.data() + sent, content.size() - sent, MSG_DONTWAIT);
    if (n > 0)
      sent += static_cast<std::size_t>(n);
    else
      writable(p.link->fd());
  }
  ran.wait_for(1);
  CHECK(left <= kTimeout - kDelay / 2);  // the worker may have been stopped between its read and its clock
  CHECK(left > kTimeout / 2);
}

CASE(a_late_reply_is_dropped) {
  Stage s;
  CHECK(s.a.call(1, {.timeout = kMillisecond}).status == CallStatus::kTimedOut);
  const Incoming late = s.p.receive();
  s.p.reply(late, "late");
  s.p.reply(late, "and twice");
  s.read_all();
  s.a.add_threads(1);
  s.p.send(message(FrameType::kGoodbye));
  s.p.link->close();
  s.a.wait_for_event(EventKind::kPeerLeft);
  CHECK_EQ(s.a.completion_count.value(), 0);
}

CASE(a_late_reply_that_must_be_processed_goes_to_the_pool) {
  Stage s;
  CHECK(s.a.call(1, {.timeout = kMillisecond}).status == CallStatus::kTimedOut);
  s.p.reply(s.p.receive(), "give me back", kMustDeliver);
  s.read_all();
  s.a.add_threads(1);
  s.a.completion_count.wait_for(1);
  CHECK_EQ(body_of(s.a.orphans[0]), "give me back");
  CHECK_EQ(s.a.orphans[0].peer, 1);
}

/// The reply arrives after the caller has stopped waiting and before it gives up.
CASE(a_reply_between_the_timeout_and_giving_up) {
  Stage s;
  Event gone;
  Request r{.keep_alive = sets_event(gone)};
  const std::uint64_t call = s.a.start(1, -1, std::move(r));
  Completion o;
  CHECK(s.a.engine->wait(call, 1, {}, o) == WaitEnd::kDeadline);
  s.p.reply(s.p.receive(), "give me back", kMustDeliver);
  s.read_all();
  s.a.engine->give_up(call);
  CHECK(gone.is_set());
  s.a.add_threads(1);
  s.a.completion_count.wait_for(1);
  CHECK_EQ(body_of(s.a.orphans[0]), "give me back");
  CHECK_EQ(s.a.orphans[0].peer, 1);
}

CASE(kept_objects_are_kept_until_the_late_reply) {
  Stage s;
  Event gone;
  CHECK(s.a.call(1, {.timeout = kMillisecond, .keep_alive = sets_event(gone)}).status == CallStatus::kTimedOut);
  const Incoming late = s.p.receive();
  s.read_all();
  CHECK(!gone.is_set());
  s.p.reply(late, "late");
  s.read_all();
  CHECK(gone.is_set());
}

CASE(kept_objects_are_released_with_the_peer) {
  Stage s;
  Event gone, gone_too;
  CHECK(s.a.call(1, {.timeout = kMillisecond, .keep_alive = sets_event(gone)}).status == CallStatus::kTimedOut);
  const std::uint64_t call = s.a.start(1, -1, {.keep_alive = sets_event(gone_too)});
  CHECK(!gone.is_set());
  s.p.link->close();
  Completion o;
  CHECK(s.a.engine->wait(call, kNever, {}, o) == WaitEnd::kDone);
  CHECK(o.status == CallStatus::kPeerLost);
  gone.wait();
  gone_too.wait();
}

CASE(kept_objects_are_released_with_the_reply_or_the_engine) {
  Event replied, stopped, unreachable;
  {
    Stage s;
    const std::uint64_t call = s.a.start(1, -1, {.keep_alive = sets_event(replied)});
    s.p.reply(s.p.receive(), "in time");
    Completion o;
    CHECK(s.a.engine->wait(call, kNever, {}, o) == WaitEnd::kDone);
    CHECK(replied.is_set());
    s.a.call(9, {.keep_alive = sets_event(unreachable)});
    CHECK(unreachable.is_set());
    CHECK(s.a.call(1, {.timeout = kMillisecond, .keep_alive = sets_event(stopped)}).status == CallStatus::kTimedOut);
  }
  CHECK(stopped.is_set());
}

CASE(a_request_that_must_be_delivered_is_sent_after_its_caller_gave_up) {
  Worker a(0, {}, 0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  Event gone, gone_async;
  CHECK(
      a.call(1, {.body = "1", .timeout = kMillisecond, .flags = kMustDeliver, .keep_alive = sets_event(gone)}).status ==
      CallStatus::kTimedOut);
  a.start(1, 1, {.body = "2", .timeout = kMillisecond, .flags = kMustDeliver, .keep_alive = sets_event(gone_async)});
  while (a.engine->stats().pending_calls > 0) std::this_thread::yield();
  CHECK(!gone.is_set() && !gone_async.is_set());
  std::thread puppet([&] {
    p.accept();
    const Incoming first = p.receive(), second = p.receive();
    CHECK_EQ(std::string(first.body_view()) + std::string(second.body_view()), "12");
    CHECK(!gone.is_set() && !gone_async.is_set());
    p.reply(first, "late");
    p.reply(second, "late");
    p.reply(p.receive(), "in time");
  });
  CHECK_EQ(body_of(a.call(1, {})), "in time");
  gone.wait();  // the reader of the late replies may still be at it after the caller has its own
  gone_async.wait();
  puppet.join();
}

CASE(kept_objects_of_an_undeliverable_request_are_released) {
  Worker a(0, {}, 0);
  Event gone, gone_too;
  auto p = std::make_unique<Puppet>(1);
  a.engine->set_peer(p->address());
  CHECK(a.call(1, {.timeout = kMillisecond, .flags = kMustDeliver, .keep_alive = sets_event(gone)}).status ==
        CallStatus::kTimedOut);
  CHECK(!gone.is_set());
  p.reset();
  CHECK(a.call(1, {.flags = kMustDeliver, .keep_alive = sets_event(gone_too)}).status == CallStatus::kUnreachable);
  gone.wait();  // the thread that failed the call releases them just after it has woken the caller
  gone_too.wait();
}

CASE(a_reply_is_accepted_only_from_the_callee) {
  Stage s;
  Puppet attacker(2);
  s.a.listen("unix");
  s.a.add_threads(2);
  attacker.connect(s.a.address());
  const std::uint64_t call = s.a.start(1, -1, {.body = "question"});
  const Incoming question = s.p.receive();
  attacker.reply(question, "a lie", kMustDeliver);
  attacker.send(message(FrameType::kReply, "not asked for", 12345));
  Message m = message(FrameType::kRequest, "x", 1);
  m.header.tag = kEcho;
  attacker.send(m);
  CHECK_EQ(std::string(attacker.receive().body_view()), "x");  // by now it has been read
  s.p.reply(question, "the truth");
  Completion o;
  CHECK(s.a.engine->wait(call, kNever, {}, o) == WaitEnd::kDone);
  CHECK_EQ(body_of(o), "the truth");
  CHECK_EQ(s.a.completion_count.value(), 0);
}

/// Replies and deadlines at the same time: each call completes once.
CASE(deadlines_and_replies_race) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const int count = times(5000);
  std::thread sync([&] {
    for (int i = 0; i < count; ++i) {
      const Completion o = a.call(1, {.body = "x", .timeout = 20 * kMicrosecond + i % 50 * kMicrosecond});
      CHECK(o.status == CallStatus::kReplied || o.status == CallStatus::kTimedOut);
    }
  });
  for (int i = 0; i < count; ++i) a.start(1, i, {.timeout = 20 * kMicrosecond + i % 100 * 5 * kMicrosecond});
  a.completion_count.wait_for(count);
  sync.join();
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

// Flow control: only request bytes that a peer has not processed are limited.
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings with_window(std::int64_t bytes) {
  Settings s;
  s.window = bytes;
  return s;
}

constexpr std::int64_t kWindow = 100'000;

/// A worker with a small window, and a puppet that has processed nothing yet.
struct Stage {
  Stage() : a(0, with_window(kWindow)), p(1) {
    a.engine->set_peer(p.address());
    std::thread puppet([&] {
      p.accept();
      Message m = message(FrameType::kReply, "hello", p.receive().header.call_id);
      m.header.credit = sizeof(FrameHeader);
      p.send(m);
    });
    CHECK_EQ(body_of(a.call(1, {})), "hello");
    puppet.join();
  }
  void grant(std::uint64_t bytes) {
    Message m = message(FrameType::kCredit);
    m.header.credit = bytes;
    p.send(m);
  }
  Worker a;
  Puppet p;
};

const std::string kMost(90'000, 'x');  // of the window
const std::string kSome(20'000, 'y');

CASE(a_caller_waits_for_the_window) {
  Stage s;
  s.a.start(1, 1, {.body = kMost});
  CHECK(!s.a.engine->may_send_now(1, kSome.size()));
  CHECK(s.a.call(1, {.body = kSome, .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);  // not sent
  Event sent;
  std::thread caller([&] {
    s.a.start(1, 2, {.body = kSome});
    sent.set();
  });
  CHECK_EQ(s.p.receive().body_view().size(), kMost.size());
  CHECK(!sent.is_set());
  s.grant(weight(kMost.size()));
  sent.wait();
  caller.join();
  CHECK_EQ(std::string(s.p.receive().body_view()), kSome);  // not the request that timed out
}

CASE(an_asynchronous_call_that_times_out_at_the_window_is_not_made) {
  Stage s;
  s.a.start(1, 1, {.body = kMost});
  s.a.start(1, 2, {.body = "never" + kSome, .timeout = 3 * kMillisecond});
  s.a.completion_count.wait_for(1);
  CHECK(s.a.completions.at(2).status == CallStatus::kTimedOut);
  s.grant(weight(kMost.size()));
  s.a.start(1, 3, {.body = "then"});
  CHECK_EQ(s.p.receive().body_view().size(), kMost.size());
  CHECK_EQ(std::string(s.p.receive().body_view()), "then");
}

CASE(messages_that_never_wait_for_the_window) {
  Stage s;
  s.a.start(1, 1, {.body = kMost});
  s.a.start(1, 2, {.body = kSome, .nested = true});
  s.a.start(1, 3, {.body = kSome, .never_wait = true});
  Request r{.body = kSome};
  CHECK(s.a.engine->send(1, compose(r)));
  for (const std::size_t size : {kMost.size(), kSome.size(), kSome.size(), kSome.size()}) {
    CHECK_EQ(s.p.receive().body_view().size(), size);
  }
}

CASE(a_growing_backlog_is_logged_once) {
  for (const bool nested : {true, false}) {
    Stage s;
    int calls = 0;
    auto more = [&](std::int64_t bytes) {
      for (std::int64_t sent = 0; sent < bytes; sent += static_cast<std::int64_t>(kSome.size())) {
        s.a.start(1, ++calls, {.body = kSome, .nested = nested, .never_wait = !nested});
        s.p.receive();
      }
    };
    more(4 * kWindow);
    s.grant(static_cast<std::uint64_t>(calls) * weight(kSome.size()));  // the peer has processed all
    const auto credit_is_here = [&] { return s.a.engine->may_send_now(1, kMost.size()); };
    while (!credit_is_here()) std::this_thread::yield();
    more(4 * kWindow);
    CHECK_EQ(s.a.event_count.value(), 0);
    more(8 * kWindow);
    CHECK(s.a.wait_for_event(EventKind::kLog).find("requests to w1 pile up") != std::string::npos);
    more(8 * kWindow);
    CHECK_EQ(s.a.event_count.value(), 1);
  }
}

CASE(a_request_larger_than_the_window_is_sent) {
  Stage s;
  const std::string huge(3 * kWindow, 'z');
  s.a.start(1, 1, {.body = huge});
  CHECK_EQ(s.p.receive().body_view().size(), huge.size());
  s.grant(weight(huge.size()) - kWindow / 2);  // half of the window is free
  s.a.start(1, 2, {.body = huge});
  CHECK_EQ(s.p.receive().body_view().size(), huge.size());
}

CASE(a_caller_at_the_window_gets_the_loss_of_the_peer) {
  for (const bool orderly : {true, false}) {
    Stage s;
    s.a.start(1, 1, {.body = kMost});
    Completion o;
    std::thread caller([&] { o = s.a.call(1, {.body = kSome}); });
    s.p.receive();
    while (s.a.engine->stats().pending_calls < 2) std::this_thread::yield();
    if (orderly) s.p.send(message(FrameType::kGoodbye));
    s.p.link->close();
    s.p.listener.reset();
    caller.join();
    CHECK(o.status == CallStatus::kPeerLost || o.status == CallStatus::kUnreachable);
  }
}

CASE(stop_ends_a_wait_for_the_window) {
  Stage s;
  s.a.start(1, 1, {.body = kMost});
  Completion o;
  std::thread caller([&] { o = s.a.call(1, {.body = kSome}); });
  while (s.a.engine->stats().pending_calls < 2) std::this_thread::yield();
  s.a.stop(0);
  caller.join();
  CHECK(o.status == CallStatus::kStopped);
}

/// The peer's window is so much larger that it would never report the credit of a small one.
CASE(windows_may_differ) {
  Worker a(0, with_window(20'000)), b(1);
  introduce({&a, &b}, "unix");
  for (int i = 0; i < 50; ++i) a.start(1, i, {.tag = kNoAnswer, .body = std::string(5'000, 'x')});
  b.handled.wait_for(50);
}

CASE_ON_EVERY_SCHEME(many_callers_share_a_small_window) {
  Worker a(0, with_window(50'000)), b(1, with_window(50'000));
  introduce({&a, &b}, scheme);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t));
      for (int i = 0; i < times(500); ++i) {
        const std::string body = random.bytes(random.below(30'000));
        Worker& from = t % 2 ? a : b;
        if (i % 2) {
          CHECK(body_of(from.call(t % 2, {.body = body})) == body);
        } else {
          from.start(t % 2, t * 10000 + i, {.body = body});
        }
      }
    });
  }
  for (auto& c : callers) c.join();
  a.completion_count.wait_for(2 * ((times(500) + 1) / 2));
  b.completion_count.wait_for(2 * ((times(500) + 1) / 2));
  CHECK(a.engine->may_send_now(1, 20'000));
  CHECK(b.engine->may_send_now(0, 20'000));
}

/// No reply is sent before the last request has arrived.
CASE_ON_EVERY_SCHEME(a_hundred_thousand_pending_calls) {
  Settings s;
  s.handshake.limits.requests = 1 << 20;
  Worker a(0, s), b(1, s);
  introduce({&a, &b}, scheme);
  const int count = times(100'000);
  for (int i = 0; i < count; ++i) a.start(1, i, {.tag = kHold, .body = "small"});
  b.handled.wait_for(16);
  b.release.set();
  a.completion_count.wait_for(count);
  std::lock_guard lock(a.mutex);
  for (int i = 0; i < count; ++i) CHECK_EQ(body_of(a.completions.at(i)), "small");
}

/// Borrowed segments are not used any more when `start` and `reply` return, although the peer reads slowly.
CASE(borrowed_memory_is_free_when_start_returns) {
  Stage s;
  std::string segment(8 << 20, 'a');
  Event returned;
  std::thread caller([&] {
    auto m = std::make_unique<Outgoing>();
    m->segments.push_back({reinterpret_cast<const std::byte*>(segment.data()), segment.size()});
    m->owner = std::make_unique<Bytes>();
    s.a.engine->start(1, std::move(m), {.target = std::make_unique<Bytes>("1")});
    segment.assign(segment.size(), 'b');
    returned.set();
  });
  while (!writable(s.p.link->fd(), 0) || !readable(s.p.link->fd(), 0)) std::this_thread::yield();
  CHECK(!returned.is_set());
  CHECK(text_of(s.p.receive().segments[0]) == std::string(8 << 20, 'a'));
  returned.wait();
  caller.join();
}

/// A message with one segment in `segment`.
std::unique_ptr<Outgoing> lending(const std::string& segment, std::uint16_t flags = 0) {
  auto m = std::make_unique<Outgoing>();
  m->header.flags = flags;
  m->segments.push_back({reinterpret_cast<const std::byte*>(segment.data()), segment.size()});
  m->owner = std::make_unique<Bytes>();
  return m;
}

CASE(memory_sent_before_the_connection_is_free_when_start_returns) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  std::string segment(2 << 20, 'a');
  Event returned;
  std::thread caller([&] {
    a.engine->start(1, lending(segment), {.target = std::make_unique<Bytes>("1")});
    segment.assign(segment.size(), 'b');
    returned.set();
  });
  p.accept();
  CHECK(!returned.is_set());
  CHECK(text_of(p.receive().segments[0]) == std::string(2 << 20, 'a'));
  caller.join();
}

/// The memory of a sender that may not wait, or that stops waiting, is copied: before the connection and on a full
/// link.
CASE(memory_of_a_message_without_a_waiter_is_copied) {
  for (const std::size_t size : {100u, 100u << 10, 8u << 20}) {
    for (const bool never_wait : {true, false}) {
      Worker a(0);
      Puppet p(1);
      a.engine->set_peer(p.address());
      const std::string want(size, 'a');
      auto send = [&](int target) {
        std::string segment = want;
        CallOptions o{.never_wait = never_wait, .target = std::make_unique<Bytes>(std::to_string(target))};
        if (!never_wait) o.deadline = now() + 5 * kMillisecond;
        a.engine->start(1, lending(segment, kMustDeliver), std::move(o));
        segment.assign(segment.size(), 'b');
      };
      send(1);
      p.accept();
      send(2);
      send(3);
      for (int i = 0; i < 3; ++i) {
        Incoming m = p.receive();
        while (m.header.type == FrameType::kCancel) m = p.receive();  // of a request whose deadline has passed
        CHECK(text_of(m.segments.at(0)) == want);
      }
    }
  }
}

CASE(memory_sent_to_an_unreachable_worker_is_free_at_once) {
  Worker a(0);
  PeerAddress unreachable{.identity = Worker::settings_of(1).handshake.me, .addresses = {"unix:@telegrad-test-none"}};
  a.engine->set_peer(unreachable);
  std::string segment(2 << 20, 'a');
  a.engine->start(1, lending(segment), {.target = std::make_unique<Bytes>("1")});
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(1).status == CallStatus::kUnreachable);
}

/// A peer that does not read requests two large replies; a pool thread sends one of them.
CASE(a_peer_that_does_not_read_replies_delays_no_other_peer) {
  const std::string want(8 << 20, 'a');
  Settings one;
  one.handlers = 1;
  Worker a(0, one), b(1);
  introduce({&a, &b}, "unix");
  auto give = [&](std::uint64_t connection, std::uint64_t call) {
    std::string segment = want;
    a.engine->reply(connection, call, lending(segment), true);
    segment.assign(segment.size(), 'b');
  };
  Event asked;
  std::uint64_t connection = 0, other = 0;
  Event given;
  a.on_custom = [&](WorkItem& item) {
    if (item.message.header.flags == 1) {
      connection = item.connection;
      other = item.message.header.call_id;
      return asked.set();
    }
    give(item.connection, item.message.header.call_id);
    given.set();
  };
  Puppet p(2);
  p.connect(a.address());
  for (const std::uint16_t flags : {1, 0}) {
    Message m = message(FrameType::kRequest, {}, flags + 1u);
    m.header.tag = kCustom;
    m.header.flags = flags;
    p.send(m);
  }
  asked.wait();
  CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
  given.wait();
  give(connection, other);  // from a thread outside the pool: does not wait
  CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
  for (int i = 0; i < 2; ++i) CHECK(text_of(p.receive().segments[0]) == want);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

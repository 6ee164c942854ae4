// The limit of the bytes of requests without a reply: at the caller, and against a hostile peer.
#include "core/request_bytes.h"
#include "tests/overload_helpers.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kBody = 128 << 10;
constexpr std::uint64_t kTwo = 300 << 10;  // two requests of kBody fit, and a third does not
constexpr std::int64_t kWeight = sizeof(FrameHeader) + kBody;

Settings with_bytes(std::uint64_t bytes) {
  Settings s;
  s.handshake.limits.request_bytes = bytes;
  return s;
}

std::string large() { return std::string(kBody, 'x'); }

std::uint64_t used(Worker& w) { return limit(w, "max_in_flight_bytes").used; }

CASE(large_requests_count_once) {
  RequestBytes bytes;
  CHECK(bytes.has_room(INT64_MAX, 0));  // any size may be the first
  bytes.add(1, kLargePayload);
  CHECK(bytes.empty());
  bytes.add(2, 100'000);
  bytes.add(2, 100'000);
  bytes.add(3, 200'000);
  CHECK_EQ(bytes.total(), 300'000);
  CHECK(bytes.has_room(100'000, 400'000) && !bytes.has_room(100'001, 400'000));
  CHECK(!bytes.has_room(100'000, 1));
  CHECK(bytes.has_room(INT64_MAX, 600'000) && !bytes.has_room(INT64_MAX, 599'999));
  CHECK(bytes.remove(2) && !bytes.remove(2) && !bytes.remove(1));
  CHECK_EQ(bytes.total(), 200'000);
}

CASE_ON_EVERY_SCHEME(a_caller_waits_while_too_many_bytes_have_no_reply) {
  for (const bool at_caller : {true, false}) {  // the less of both limits counts
    Worker a(0, with_bytes(at_caller ? kTwo : 1 << 30), 4), b(1, with_bytes(at_caller ? 1 << 30 : kTwo), 8);
    introduce({&a, &b}, scheme);
    CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    for (int i = 0; i < 2; ++i) a.start(1, i, {.tag = kHold, .body = large()});
    b.handled.wait_for(3);  // they run, so the window of bytes is open
    CHECK_EQ(used(a), std::uint64_t{2 * kWeight});
    CHECK(!a.engine->may_send_now(1, kBody));
    CHECK(a.engine->may_send_now(1, 1));
    CHECK_EQ(body_of(a.call(1, {.body = "small"})), "small");
    a.start(1, 10, {.body = large(), .nested = true});
    a.start(1, 11, {.body = large(), .never_wait = true});
    a.completion_count.wait_for(2);
    check_overloaded(a.completions.at(10), "max_in_flight_bytes");
    check_overloaded(a.completions.at(11), "max_in_flight_bytes");
    CHECK(a.call(1, {.body = large(), .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
    CHECK_EQ(b.handled.value(), 4);
    Event sent;
    std::thread caller([&] {
      CHECK_EQ(body_of(a.call(1, {.body = large()})), large());
      sent.set();
    });
    while (a.engine->stats().pending_calls < 3) std::this_thread::yield();
    CHECK(!sent.is_set());
    b.release.set();
    caller.join();
    a.completion_count.wait_for(4);
    CHECK_EQ(limit(a, "max_in_flight_bytes").refused, 2u);
    CHECK_EQ(used(a), 0u);
    CHECK(a.engine->may_send_now(1, kBody));
  }
}

/// The replies that free the bytes report no credit, which would notify the caller as well. Another caller leads.
CASE_ON_EVERY_SCHEME(a_waiting_caller_is_notified_of_a_reply) {
  Worker a(0, with_bytes(450 << 10), 1), b(1, {}, 7);
  introduce({&a, &b}, scheme);
  std::mutex mutex;
  std::vector<WorkItem> held;
  b.on_custom = [&](WorkItem& item) {
    std::lock_guard lock(mutex);
    held.push_back(std::move(item));
  };
  std::vector<std::thread> callers;
  const auto call = [&](std::size_t size, Tag tag = kCustom) {
    callers.emplace_back([&a, size, tag] {
      CHECK(a.call(1, {.tag = tag, .body = std::string(size, 'x'), .timeout = 20 * kSecond}).status ==
            CallStatus::kReplied);
    });
  };
  call(1);
  b.handled.wait_for(1);
  for (int i = 1; i <= 3; ++i) {
    call(kBody);
    b.handled.wait_for(1 + i);
  }
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");  // its reply reports the credit
  call(300 << 10, kEcho);
  while (a.engine->stats().pending_calls < 5) std::this_thread::yield();
  const auto answer = [&](std::size_t i) {
    std::lock_guard lock(mutex);
    b.answer(held.at(i), "done");
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(b.handled.value(), 5);
  for (std::size_t i = 1; i <= 2; ++i) answer(i);
  b.handled.wait_for(6);
  answer(3);
  answer(0);
  for (auto& c : callers) c.join();
}

/// Many callers see room at once, and only as many go on as fit. Calls that end early leave nothing behind.
CASE(callers_share_a_few_bytes) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, kTwo}) {
    Worker a(0, with_bytes(bytes), 4), b(1, {}, 6);
    introduce({&a, &b}, "shm");
    std::atomic<int> running = 0, most = 0;
    b.on_custom = [&](WorkItem& item) {
      const int now = ++running;
      for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      --running;
      b.answer(item, "done");
    };
    CHECK_EQ(body_of(a.call(1, {.tag = kCustom})), "done");
    std::vector<std::thread> callers;
    for (int t = 0; t < 16; ++t) {
      callers.emplace_back([&, t] {
        for (int i = 0; i < times(100); ++i) {
          const Nanos timeout = t < 2 ? (1 + i % 7) * 30 * kMicrosecond : 0;
          const Completion o = a.call(1, {.tag = kCustom, .body = large(), .timeout = timeout});
          CHECK(o.status == CallStatus::kReplied || (timeout > 0 && o.status == CallStatus::kTimedOut));
        }
      });
    }
    for (auto& c : callers) c.join();
    CHECK(most >= 1 && most <= (bytes == 1 ? 1 : 2));
    while (used(a) > 0) CHECK_EQ(body_of(a.call(1, {.tag = kCustom})), "done");  // until late replies have arrived
    CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
  }
}

CASE(a_call_that_has_ended_counts_until_its_reply) {
  Worker a(0, with_bytes(kTwo)), b(1);
  introduce({&a, &b}, "unix");
  CHECK(a.call(1, {.tag = kHold, .body = large(), .timeout = 20 * kMillisecond}).status == CallStatus::kTimedOut);
  CHECK_EQ(used(a), std::uint64_t{kWeight});
  b.release.set();
  while (used(a) > 0) CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
}

CASE(bytes_that_wait_for_a_connection_count) {
  Worker a(0, with_bytes(kTwo));
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept yet
  for (int i = 0; i < 3; ++i) a.start(1, i, {.body = large(), .never_wait = true});
  a.completion_count.wait_for(1);
  check_overloaded(a.completions.at(2), "max_in_flight_bytes");
  CHECK_EQ(used(a), std::uint64_t{2 * kWeight});
  CHECK(a.call(1, {.segments = {large()}, .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
  a.start(1, 3, {.body = "small", .never_wait = true});
  p.accept();
  for (int i = 0; i < 3; ++i) p.reply(p.receive(), "read");
  a.completion_count.wait_for(4);
  CHECK_EQ(body_of(a.completions.at(3)), "read");
  CHECK_EQ(used(a), 0u);
}

/// The caller learns the callee's limit only with the connection.
CASE(more_bytes_have_waited_for_the_connection_than_the_peer_admits) {
  Worker a(0), b(1, with_bytes(kTwo));
  b.listen("unix");
  a.meet(b);
  constexpr int kCalls = 12;
  for (int i = 0; i < kCalls; ++i) a.start(1, i, {.tag = kHold, .body = large(), .never_wait = true});
  a.completion_count.wait_for(kCalls - 4);  // twice the limit is sent
  b.release.set();
  a.completion_count.wait_for(kCalls);
  int failed = 0;
  for (int i = 0; i < kCalls; ++i) {
    if (a.completions.at(i).status == CallStatus::kReplied) continue;
    check_overloaded(a.completions.at(i), "max_in_flight_bytes");
    ++failed;
  }
  CHECK(failed >= kCalls - 4);
  CHECK_EQ(b.handled.value() + failed, kCalls);
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
}

// ---- a peer that ignores it

constexpr std::size_t kHuge = 8 << 20;
constexpr int kMost = 10;  // times kHuge: without one, the first that is more than twice 1 MiB and 64 MiB

Message request(std::uint64_t call, Tag tag, std::size_t size) {
  Message m = message(FrameType::kRequest, std::string(size, 'x'), call);
  m.header.tag = tag;
  return m;
}

CASE(a_peer_with_far_more_bytes_is_disconnected) {
  Worker b(1, with_bytes(1 << 20));
  b.listen("unix");
  b.on_custom = [&](WorkItem& item) { b.answer(item, "done"); };
  Puppet p(0);
  p.connect(b.address());
  for (std::uint64_t i = 1; i <= 2 * kMost; ++i) {  // replies free their bytes
    p.send(request(i, kCustom, kHuge));
    p.receive();
  }
  for (std::uint64_t i = 1; i <= kMost; ++i) p.send(request(100 + i, kNoAnswer, kHuge));
  b.handled.wait_for(3 * kMost);
  p.send(request(200, kCustom, 1));
  p.receive();
  CHECK_EQ(b.event_count.value(), 0);
  p.send(request(300, kNoAnswer, kHuge));
  CHECK_SAYS(b.wait_for_event(EventKind::kPeerLost), "max_in_flight_bytes: 1048576");
  p.wait_for_end();
  CHECK_EQ(b.handled.value(), 3 * kMost + 1);
  CHECK_EQ(limit(b, "max_in_flight_bytes").refused, 1u);
}

/// Its reply would free the bytes of both.
CASE(a_peer_that_makes_a_large_call_twice_is_disconnected) {
  for (const std::size_t second : {kBody, std::size_t{1}}) {
    Worker b(1);
    b.listen("unix");
    Puppet p(0);
    p.connect(b.address());
    p.send(request(7, kNoAnswer, kBody));
    p.send(request(8, kNoAnswer, 1));
    p.send(request(8, kNoAnswer, 1));
    b.handled.wait_for(3);
    p.send(request(7, kNoAnswer, second));
    CHECK_SAYS(b.wait_for_event(EventKind::kPeerLost), "one call twice");
  }
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

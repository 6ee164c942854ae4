// Limits of what waits for a connection, and of the peers that a worker knows.
#include <algorithm>

#include "tests/overload_helpers.h"

namespace telegrad::test {
namespace {

// ---- messages that wait for a connection

CASE(bytes_that_wait_for_a_connection_are_limited) {
  Worker a(0, with_load({.send_queue = 2 * kLarge}));
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept yet
  a.start(1, 1, {.body = std::string(kLarge, 'x'), .never_wait = true});
  CHECK_EQ(limit(a, "send_queue_bytes").refused, 0u);
  const std::uint64_t one = limit(a, "send_queue_bytes").used;
  CHECK(one >= kLarge && one < kLarge + 1000);
  a.start(1, 2, {.body = std::string(kLarge, 'x'), .never_wait = true});  // with its header it is too large
  a.completion_count.wait_for(1);
  check_overloaded(a.completions.at(2), "send_queue_bytes");
  CHECK_SAYS(a.completions.at(2).why, "wait for a connection to worker");
  a.start(1, 3, {.body = "small", .never_wait = true});
  CHECK_EQ(limit(a, "send_queue_bytes").refused, 1u);
  CHECK(limit(a, "send_queue_bytes").used > one);
  p.accept();
  for (int i = 0; i < 2; ++i) p.reply(p.receive(), "at last");
  a.completion_count.wait_for(3);
  CHECK_EQ(body_of(a.completions.at(1)), "at last");
  CHECK_EQ(limit(a, "send_queue_bytes").used, 0u);
}

/// A message of any size is admitted as the first one, so it must not end the session, whenever that begins.
CASE(admitted_messages_never_end_a_session) {
  constexpr std::size_t kHuge = 80 << 20;  // more than twice the limit and 64 MiB
  for (const bool connected : {false, true}) {
    Worker a(0, with_load({.send_queue = 1 << 20}));
    Puppet p(1);
    a.engine->set_peer(p.address());
    if (connected) {
      a.start(1, 1, {.body = "x", .never_wait = true});
      p.accept();
      p.reply(p.receive(), "read");
      a.completion_count.wait_for(1);
    }
    a.start(1, 2, {.body = std::string(kHuge, 'x'), .never_wait = true});
    Request forced{.body = "forced"};
    CHECK(a.engine->send(1, compose(forced)));
    if (!connected) p.accept();
    Incoming huge = p.receive();
    if (huge.payload_size() < kHuge) huge = p.receive();
    CHECK_EQ(huge.payload_size(), kHuge);
    p.reply(huge, "whole");
    a.completion_count.wait_for(connected ? 2 : 1);
    CHECK_EQ(body_of(a.completions.at(2)), "whole");
    CHECK_EQ(a.event_count.value(), 0);
  }
}

CASE(one_way_bytes_to_a_peer_without_a_connection_end_in_its_loss) {
  Worker a(0, with_load({.send_queue = 1}));
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept
  const auto large = [] {
    Request r{.body = std::string(1 << 20, 'x')};
    return compose(r);
  };
  for (int i = 0; i < 63; ++i) CHECK(a.engine->send(1, large()));
  CHECK_EQ(a.event_count.value(), 0);
  a.engine->send(1, large());
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "send_queue_bytes: 1");
  CHECK_EQ(limit(a, "send_queue_bytes").used, 0u);
}

/// A message whose thread waits is admitted. When the thread stops waiting, its copy counts as forced.
CASE(copies_of_messages_whose_threads_stopped_waiting_end_a_session) {
  constexpr std::size_t kHuge = 100 << 20;
  Worker a(0, with_load({.send_queue = 1}));
  Puppet p(1);
  p.meet(a);
  Request huge;
  huge.segments = {std::string(kHuge, 'x')};
  huge.timeout = 50 * kMillisecond;
  CHECK(a.call(1, std::move(huge)).status == CallStatus::kTimedOut);
  // The cancellation of the call is one more message in the queue.
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "send_queue_bytes: 1");
}

/// A caller that may wait does so before a queue is full.
CASE(callers_wait_for_the_window_without_a_connection) {
  Settings s = with_load({.send_queue = 100 * kLarge});
  s.window = 2 * kLarge;
  Worker a(0, s);
  Puppet p(1);
  a.engine->set_peer(p.address());
  a.start(1, 1, {.body = std::string(kLarge, 'x')});
  CHECK(!a.engine->may_send_now(1, 2 * kLarge));
  CHECK(a.call(1, {.body = std::string(2 * kLarge, 'x'), .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
  p.accept();
  p.reply(p.receive(), "at last");
  a.completion_count.wait_for(1);
  CHECK_EQ(body_of(a.completions.at(1)), "at last");
}

CASE(calls_that_wait_for_a_connection_are_limited) {
  Worker a(0, with_load({.waiting_messages = 4}));
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept yet
  for (int i = 1; i <= 4; ++i) a.start(1, i, {.never_wait = true});
  CHECK_EQ(limit(a, "max_waiting_messages").used, 4u);
  for (const bool nested : {true, false}) {
    check_overloaded(a.call(1, {.nested = true}), "max_waiting_messages");
    a.start(1, nested ? 5 : 6, {.nested = nested, .never_wait = !nested});
  }
  a.completion_count.wait_for(2);
  check_overloaded(a.completions.at(5), "max_waiting_messages");
  check_overloaded(a.completions.at(6), "max_waiting_messages");
  CHECK(a.call(1, {.timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
  std::thread caller([&] { CHECK_EQ(body_of(a.call(1, {})), "at last"); });
  while (a.engine->stats().pending_calls < 5) std::this_thread::yield();
  p.accept();
  for (int i = 0; i < 5; ++i) p.reply(p.receive(), "at last");
  caller.join();
  a.completion_count.wait_for(6);
  CHECK_EQ(body_of(a.completions.at(4)), "at last");
}

CASE(one_way_messages_to_a_peer_without_a_connection_end_in_its_loss) {
  Worker a(0, with_load({.waiting_messages = 4}));
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept
  Request r;
  for (int i = 0; i < 7; ++i) CHECK(a.engine->send(1, compose(r)));
  CHECK_EQ(a.event_count.value(), 0);
  a.engine->send(1, compose(r));
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "max_waiting_messages: 4");
  CHECK_EQ(limit(a, "max_waiting_messages").used, 0u);
}

/// The caller learns the callee's limit only with the connection.
CASE(more_calls_have_waited_for_the_connection_than_the_peer_admits) {
  Worker a(0), b(1, with_requests(3));
  b.listen("unix");
  a.meet(b);
  constexpr int kCalls = 3 + kHardRequests + 100;
  for (int i = 0; i < kCalls; ++i) a.start(1, i, {.body = "x", .never_wait = true});
  a.completion_count.wait_for(kCalls);
  int failed = 0;
  for (int i = 0; i < kCalls; ++i) {
    if (a.completions.at(i).status == CallStatus::kReplied) continue;
    check_overloaded(a.completions.at(i), "max_in_flight");
    ++failed;
  }
  CHECK(failed >= 100);
  CHECK_EQ(b.handled.value() + failed, kCalls);
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
}

// ---- peers

CASE(further_peers_are_refused) {
  Worker b(1, with_load({.peers = 2}));
  b.listen("unix");
  Puppet first(2), second(3), third(4);
  first.connect(b.address());
  second.connect(b.address());
  third.prove(b.address());
  CHECK(third.receive().header.type == FrameType::kRefuse);
  CHECK_EQ(limit(b, "max_peers").used, 2u);
  CHECK_EQ(limit(b, "max_peers").refused, 1u);
  b.engine->set_epoch(5, 1);
  CHECK_EQ(limit(b, "max_peers").used, 2u);  // it is not a peer yet
  first.link->close();
  b.wait_for_event(EventKind::kPeerLost);
  first.connect(b.address());  // a known one
}

CASE(peers_that_have_left_make_room) {
  constexpr std::uint64_t kPeers = 2;
  Worker b(1, with_load({.peers = kPeers}));
  b.listen("unix");
  for (int i = 0; i < 10; ++i) {
    Puppet p(10 + i);
    p.connect(b.address());
    p.send(message(FrameType::kGoodbye));
    p.link->close();
    while (limit(b, "max_peers").used > 0) std::this_thread::yield();
  }
  Puppet stays(2);
  stays.connect(b.address());
  b.engine->set_epoch(77, 3);  // of a peer that is forgotten, or not known yet
  CHECK_EQ(limit(b, "max_peers").used, 1u);
  CHECK_EQ(limit(b, "max_peers").refused, 0u);
  const Snapshot s = b.engine->snapshot([](std::uint64_t, const KeepAlive&) {});
  CHECK(s.peers.size() <= 1 + kPeers + 1);  // those present, the last that have left, and one
}

/// Nothing is known of its earlier process, so the layer above is notified of a return.
CASE(a_peer_that_was_forgotten_returns) {
  Worker b(1, with_load({.peers = 1}));
  b.listen("unix");
  for (int id = 2; id < 5; ++id) {
    Puppet p(id);
    p.connect(b.address());
    p.send(message(FrameType::kGoodbye));
    p.link->close();
    while (limit(b, "max_peers").used > 0) std::this_thread::yield();
  }
  Puppet again(2);
  ++again.config.me.incarnation;
  again.connect(b.address());
  const auto is_back = [&] {
    std::lock_guard lock(b.mutex);
    return std::ranges::any_of(b.events,
                               [](const WorkItem& e) { return e.event == EventKind::kPeerBack && e.peer == 2; });
  };
  while (!is_back()) std::this_thread::yield();
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

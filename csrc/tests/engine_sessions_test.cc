// Sessions of two engines: one connection per pair, ends in order, and processes that were replaced or removed.
//
// This program replaces `send`, so that a case can hold the welcome to a peer.
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// Set by a case: a welcome, and the permission to send it.
struct Welcoming {
  Event begun, go_on;
};
std::atomic<Welcoming*> welcoming = nullptr;

void on_send(const void* data, std::size_t size) {
  FrameHeader h;
  if (size < sizeof h) return;
  std::memcpy(&h, data, sizeof h);
  if (h.magic != kMagic || h.type != FrameType::kWelcome) return;
  if (Welcoming* const held = welcoming.exchange(nullptr)) {
    held->begun.set();
    held->go_on.wait();
  }
}

void check_refused(Worker& by, int id) {
  Puppet p(id);
  p.prove(by.address());
  CHECK(p.receive().header.type == FrameType::kRefuse);
}

/// A session opens once the loss of the last one has been acknowledged, although other threads are free.
CASE(a_session_opens_after_the_loss_of_the_last) {
  Worker a(0);
  a.listen("unix");
  Event lost, may_go_on;
  std::atomic<bool> processed = false;
  a.on_session_event = [&](const WorkItem& item) {
    if (item.event == EventKind::kPeerLost) {
      lost.set();
      may_go_on.wait();
      processed = true;
    }
    a.engine->acknowledge(item.peer);
  };
  Puppet p(1);
  p.connect(a.address());
  p.link->close();
  lost.wait();
  Event connecting;
  std::thread returns([&] {
    connecting.set();
    p.connect(a.address());
    CHECK(processed);
  });
  connecting.wait();
  Puppet other(2);  // its messages pass meanwhile
  other.connect(a.address());
  Message request = message(FrameType::kRequest, "y", 1);
  request.header.tag = kEcho;
  other.send(request);
  CHECK_EQ(std::string(other.receive().body_view()), "y");
  may_go_on.set();
  returns.join();
}

/// Both ends dial at once, again and again; the pair has one connection, and no session ends without a cause.
CASE_ON_EVERY_SCHEME(one_session_for_two_dials) {
  for (int round = 0; round < times(100); ++round) {
    Worker a(0), b(1);
    introduce({&a, &b}, scheme);
    std::thread other([&] { CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x"); });
    CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
    other.join();
    for (Worker* w : {&a, &b}) {
      while (w->engine->stats().connections != 1) std::this_thread::yield();  // the other one closes
      CHECK_EQ(w->event_count.value(), 0);
    }
  }
}

/// A peer that is announced as back connects, or is lost once more: whatever counts on it is not left waiting.
CASE(a_peer_that_is_back_and_does_not_connect_is_lost_again) {
  Worker a(0);
  a.listen("unix");
  Puppet p(1);
  std::vector<EventKind> kinds;
  Counter seen;
  a.on_session_event = [&](const WorkItem& item) {
    kinds.push_back(item.event);
    if (item.event == EventKind::kPeerBack) p.link->close();
    seen.add();
    a.engine->acknowledge(item.peer);
  };
  p.connect(a.address());
  p.link->close();
  seen.wait_for(1);
  p.prove(a.address());
  seen.wait_for(3);
  CHECK((kinds == std::vector{EventKind::kPeerLost, EventKind::kPeerBack, EventKind::kPeerLost}));
}

/// A message made before the end of a session is not sent in the next one.
CASE(messages_of_an_ended_session_are_not_sent) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const auto with_epoch = [&](std::int64_t epoch) {
    Request call{.body = "x"};
    auto m = compose(call);
    m->epoch = epoch;
    const std::uint64_t id = a.engine->start(1, std::move(m), {});
    Completion completion;
    CHECK(a.engine->wait(id, kNever, {}, completion) == WaitEnd::kDone);
    return completion;
  };
  CHECK_EQ(body_of(with_epoch(0)), "x");
  a.engine->set_epoch(1, 1);
  CHECK(with_epoch(0).status == CallStatus::kPeerLost);
  CHECK_EQ(body_of(with_epoch(1)), "x");
}

/// A worker that was replaced while it was stopped is not connected any more, and gets the reason.
CASE(an_older_process_is_refused) {
  Worker a(0);
  a.listen("unix");
  Puppet older(1), newer(1);
  newer.config.me.incarnation = 2077;
  newer.connect(a.address());
  Worker zombie(1);
  zombie.engine->set_peer(a.address());
  const Completion completion = zombie.call(0, {});
  CHECK(completion.status == CallStatus::kUnreachable);
  CHECK_SAYS(completion.why, "another worker has taken the name w1");
  CHECK_SAYS(zombie.wait_for_event(EventKind::kReplaced), "another worker has taken the name w1");
}

/// The error of a call to the older process tells what has happened to it.
CASE(a_call_to_a_process_that_is_replaced_says_so) {
  Worker a(0);
  a.listen("unix");
  Puppet older(1), newer(1);
  newer.config.me.incarnation = 2077;
  older.connect(a.address());
  a.link_count.wait_for(1);
  a.start(1, 0, {.tag = kHold, .body = "held"});
  CHECK(older.receive().header.type == FrameType::kRequest);
  newer.connect(a.address());
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(0).status == CallStatus::kPeerLost);
  CHECK_SAYS(a.completions.at(0).why, "another process has become worker w1");
}

/// The newer process was lost; the older one does not count as its return.
CASE(an_older_process_is_refused_after_the_loss_of_the_newer_one) {
  Worker a(0);
  a.listen("unix");
  Puppet newer(1);
  newer.config.me.incarnation = 2077;
  newer.connect(a.address());
  newer.link->close();
  a.wait_for_event(EventKind::kPeerLost);
  Worker zombie(1);
  zombie.engine->set_peer(a.address());
  CHECK_SAYS(zombie.call(0, {}).why, "another worker has taken the name w1");
  std::lock_guard lock(a.mutex);
  for (const WorkItem& event : a.events) CHECK(event.event != EventKind::kPeerBack);
}

/// The group may learn late that an older process has ended; a newer one under its name goes on.
CASE(the_end_of_an_older_incarnation_leaves_the_session_of_a_newer_one) {
  Settings newer = Worker::settings_of(1);
  newer.handshake.me.incarnation = 2077;
  Worker a(0), b(1, newer);
  introduce({&a, &b}, "unix");
  CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
  a.engine->remove_peer(1, "killed", 2076);
  a.engine->disconnect(1, "it left", 2076);
  CHECK(a.engine->stats().connections == 1);
  CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
  CHECK(a.event_count.value() == 0);
  a.engine->remove_peer(1, "killed", 2077);
  CHECK(a.call(1, {}).status == CallStatus::kUnreachable);
  b.wait_for_event(EventKind::kPeerLost);  // b has got no goodbye
}

/// The newer process has connected before the group's log names it.
CASE(the_end_of_an_incarnation_that_was_announced_leaves_the_newer_one_that_connected) {
  Worker a(0);
  a.listen("unix");
  Puppet older(1), newer(1);
  newer.config.me.incarnation = 2077;
  a.engine->set_peer(older.address());
  newer.connect(a.address());
  a.engine->disconnect(1, "it left", older.config.me.incarnation);
  Message request = message(FrameType::kRequest, "y", 1);
  request.header.tag = kEcho;
  newer.send(request);
  CHECK_EQ(std::string(newer.receive().body_view()), "y");
  a.engine->remove_peer(1, "killed", older.config.me.incarnation);
  newer.link->close();
  newer.connect(a.address());  // it is still a member
}

/// The welcome arrives when `remove_peer` has removed the peer, and has not closed the connection yet.
CASE(a_removed_peer_does_not_return_with_a_dial_under_way) {
  Worker a(0);
  a.listen("unix");
  Puppet p(1);
  a.engine->set_peer(p.address());
  Handshake::Step step;
  const auto in_between = [&] {
    for (int i = 0; i < 2; ++i) p.send(message(*step.send, step.body));  // a second welcome is an error
    p.wait_for_end();
  };
  a.start(1, 0, {.keep_alive = std::make_unique<Bytes>("", std::vector<std::string>(), in_between)});
  CHECK(readable(p.listener->fd()));
  p.link = p.listener->accept();
  Handshake handshake = Handshake::accept(p.config);
  while (!step.open) {
    if (step.send) p.send(message(*step.send, step.body));
    const Incoming m = p.receive();
    step = advance(handshake, m.header.type, m.body_view());
  }
  a.engine->remove_peer(1, "removed");
  CHECK_EQ(a.event_count.value(), 0);
  check_refused(a, 1);
}

/// The peer is removed while it is being welcomed.
CASE(a_removed_peer_does_not_return_with_an_accepted_connection) {
  Worker a(0);
  a.listen("unix");
  Puppet p(1);
  a.engine->set_peer(p.address());
  Welcoming held;
  welcoming = &held;
  p.prove(a.address());
  held.begun.wait();
  const auto in_between = [&] { held.go_on.set(); };
  a.start(1, 0, {.keep_alive = std::make_unique<Bytes>("", std::vector<std::string>(), in_between)});
  a.engine->remove_peer(1, "removed");
  CHECK_EQ(a.engine->stats().connections, 0u);
  check_refused(a, 1);
}

/// A newer process connects while the older one is removed.
CASE(the_end_of_an_older_incarnation_leaves_the_newer_one_that_connects) {
  Worker a(0);
  a.listen("unix");
  Puppet older(1), newer(1);
  newer.config.me.incarnation = 2077;
  a.engine->set_peer(older.address());
  Welcoming held;
  welcoming = &held;
  newer.prove(a.address());
  held.begun.wait();
  const auto in_between = [&] { held.go_on.set(); };
  a.start(1, 0, {.keep_alive = std::make_unique<Bytes>("", std::vector<std::string>(), in_between)});
  a.engine->remove_peer(1, "killed", older.config.me.incarnation);
  CHECK_EQ(a.engine->stats().connections, 1u);
  CHECK(newer.receive().header.type == FrameType::kWelcome);
  newer.link->close();
  a.wait_for_event(EventKind::kPeerLost);
}

/// A call is made within `set_peer`, when the session with the older process has ended.
CASE(an_older_process_that_is_dialed_while_it_is_replaced_gets_no_session) {
  Settings replacing = Worker::settings_of(1);
  replacing.handshake.me.incarnation = 2077;
  Worker a(0), older(1), newer(1, replacing);
  older.listen("unix");
  newer.listen("unix");
  a.meet(older);
  Completion call;
  const auto in_between = [&] { call = a.call(1, {.body = "x"}); };
  a.start(1, 0, {.tag = kNoAnswer, .keep_alive = std::make_unique<Bytes>("", std::vector<std::string>(), in_between)});
  older.handled.wait_for(1);
  PeerAddress address = newer.address();
  address.identity.incarnation = 2077;
  a.engine->set_peer(address);
  CHECK_SAYS(call.why, "an older process of worker w1 answers at this address");
  CHECK(call.loss == wire::Loss::kOlder);
  CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
}

CASE_ON_EVERY_SCHEME(both_connect_at_once) {
  for (int round = 0; round < times(100); ++round) {
    Worker a(0), b(1);
    introduce({&a, &b}, scheme);
    std::thread other([&] {
      for (int i = 0; i < 5; ++i) CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
    });
    for (int i = 0; i < 5; ++i) CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
    other.join();
    b.stop();
    CHECK_EQ(a.wait_for_event(EventKind::kPeerLeft), "it shut down");
  }
}

}  // namespace
}  // namespace telegrad::test

extern "C" ssize_t send(int fd, const void* data, std::size_t size, int flags) {
  telegrad::test::on_send(data, size);
  return ::sendto(fd, data, size, flags, nullptr, 0);  // which the sanitizers see
}

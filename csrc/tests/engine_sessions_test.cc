// Sessions of two engines: one connection per pair, ends in order, and processes that were replaced.
#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

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

// Peers that die, leave, send malformed frames, or never existed, and the completions of the calls to them.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

// ---- the end of a peer

CASE_ON_EVERY_SCHEME(a_peer_that_shuts_down_fails_its_callers) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.tag = kNoAnswer}); });
  a.start(1, 5, {.tag = kNoAnswer});
  b.handled.wait_for(2);
  b.stop();
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK_EQ(completion.why, "it shut down");
  CHECK(completion.loss == Loss::kOther);
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(5).status == CallStatus::kPeerLost);
  CHECK_EQ(a.wait_for_event(EventKind::kPeerLeft), "it shut down");
  const Completion next = a.call(1, {});
  CHECK(next.status == CallStatus::kUnreachable);
  CHECK_SAYS(next.why, "it shut down");
}

CASE_ON_EVERY_SCHEME(a_link_without_goodbye_fails_its_callers) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.tag = kNoAnswer}); });
  a.start(1, 5, {.tag = kNoAnswer});
  b.handled.wait_for(2);
  b.engine->remove_peer(0, "for the test");
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK_SAYS(completion.why, "died");
  CHECK(completion.loss == Loss::kClosed);
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(5).loss == Loss::kClosed);
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "died");
}

CASE(a_truncated_frame_fails_its_callers) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {}); });
  p.accept();
  p.receive();
  const char half[20] = {'T', 'G', 'R', '1'};
  CHECK_EQ(::write(p.link->fd(), half, sizeof half), static_cast<ssize_t>(sizeof half));
  p.link->close();
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK_SAYS(completion.why, "middle of a frame");
  CHECK(completion.loss == Loss::kOther);
}

CASE(calls_to_other_peers_continue) {
  Worker a(0), b(1), c(2), d(3);
  introduce({&a, &b, &c, &d}, "unix");
  std::atomic<bool> enough = false;
  Counter went_on;
  std::vector<std::thread> callers;
  for (auto [from, to] : {std::pair{&a, 1}, {&b, 0}, {&c, 0}, {&a, 2}}) {
    callers.emplace_back([&, from = from, to = to] {
      while (!enough) {
        CHECK_EQ(body_of(from->call(to, {.body = "x"})), "x");
        went_on.add();
      }
    });
  }
  Counter failed;
  for (Worker* w : {&a, &b, &c}) {
    callers.emplace_back([&, w] {
      while (true) {
        const Completion o = w->call(3, {.body = "y"});
        if (o.status != CallStatus::kReplied) break;
      }
      failed.add();
    });
  }
  went_on.wait_for(20);
  d.stop(0);
  failed.wait_for(3);
  went_on.wait_for(went_on.value() + times(200));
  enough = true;
  for (auto& t : callers) t.join();
}

/// The sending and the reading thread see the end of a link at the same time.
CASE_ON_EVERY_SCHEME(senders_and_reader_see_the_end_together) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const int rounds = times(30);
  for (int round = 0; round < rounds; ++round) {
    const int calls = 40;
    std::vector<std::thread> callers;
    Counter begun;
    for (int t = 0; t < 3; ++t) {
      callers.emplace_back([&, t] {
        for (int i = 0; i < calls; ++i) {
          if (t == 0) {
            a.start(1, round * calls + i, {.body = "x"});
          } else {
            a.call(1, {.body = "y"});
          }
          begun.add();
        }
      });
    }
    begun.wait_for(10);
    b.engine->remove_peer(0, "for the test");
    for (auto& t : callers) t.join();
    a.completion_count.wait_for((round + 1) * calls);
    CHECK_EQ(a.engine->stats().pending_calls, 0u);
    b.meet(a);
    while (a.call(1, {}).status != CallStatus::kReplied) {
    }
  }
}

/// Links end at every step of the handshake.
CASE_ON_EVERY_SCHEME(links_end_while_they_open) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const int rounds = times(300);
  for (int i = 0; i < rounds; ++i) {
    Event go;
    std::thread forgets([&] {
      go.wait();
      (i % 2 ? a : b).engine->remove_peer(i % 2, "for the test");
    });
    go.set();
    const Completion o = a.call(1, {.body = "x"});
    CHECK(o.status == CallStatus::kReplied || o.status == CallStatus::kUnreachable ||
          o.status == CallStatus::kPeerLost);
    forgets.join();
    a.meet(b);
    b.meet(a);
  }
  while (a.call(1, {}).status != CallStatus::kReplied) {
  }
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

/// Frames that a peer sent before it closed are read, although a send has failed before that.
CASE(replies_and_goodbye_survive_a_failed_send) {
  Worker a(0, {}, 0);  // no thread reads unless the test does
  Puppet p(1);
  a.engine->set_peer(p.address());
  std::thread puppet([&] {
    p.accept();
    p.reply(p.receive(), "first");
  });
  CHECK_EQ(body_of(a.call(1, {})), "first");
  puppet.join();
  const std::uint64_t second = a.start(1, -1, {}), third = a.start(1, -1, {});
  p.reply(p.receive(), "second");
  p.receive();
  p.send(message(FrameType::kGoodbye));
  p.link->close();
  p.link.reset();
  const std::uint64_t fourth = a.start(1, -1, {});  // this send fails
  Completion completion;
  CHECK(a.engine->wait(second, kNever, {}, completion) == WaitEnd::kDone);
  CHECK_EQ(body_of(completion), "second");
  for (const std::uint64_t call : {third, fourth}) {
    CHECK(a.engine->wait(call, kNever, {}, completion) == WaitEnd::kDone);
    CHECK(completion.status == CallStatus::kPeerLost);
    CHECK_EQ(completion.why, "it shut down");
  }
}

CASE(a_peer_comes_back) {
  Worker a(0);
  auto b = std::make_unique<Worker>(1);
  introduce({&a, b.get()}, "unix");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  b.reset();
  a.wait_for_event(EventKind::kPeerLeft);
  Settings again = Worker::settings_of(1);
  again.handshake.me.incarnation = 2077;
  Worker b2(1, again);
  b2.listen("unix");
  PeerAddress address = b2.address();
  a.engine->set_peer(address);  // it still says incarnation 1001
  const Completion o = a.call(1, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_SAYS(o.why, "is not at this address");
  address.identity.incarnation = 2077;
  a.engine->set_peer(address);
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
}

/// Two processes may have had the same id, one after the other.
CASE(a_goodbye_is_not_that_of_another_process) {
  Worker a(0);
  a.listen("unix");
  Puppet dies(1), leaves(1);
  leaves.config.me.incarnation = 2077;
  a.engine->set_peer(dies.address());
  dies.connect(a.address());
  const std::uint64_t call = a.start(1, -1, {});
  dies.receive();
  a.engine->set_peer(leaves.address());
  leaves.connect(a.address());
  leaves.send(message(FrameType::kGoodbye));
  Message request = message(FrameType::kRequest, "behind the goodbye", 1);
  request.header.tag = kEcho;
  leaves.send(request);
  CHECK_EQ(std::string(leaves.receive().body_view()), "behind the goodbye");
  dies.link->close();
  Completion completion;
  CHECK(a.engine->wait(call, kNever, {}, completion) == WaitEnd::kDone);
  CHECK_SAYS(completion.why, "another process has become worker w1");
}

// ---- unreachable peers

CASE(a_worker_that_does_not_exist) {
  Worker a(0);
  Completion o = a.call(9, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_EQ(o.why, "no such worker");
  for (const std::string address : {"unix:@telegrad-test-none", "inproc:none", "tcp:127.0.0.1:1", "carrier-pigeon:x",
                                    "tcp:not-a-number:7", "tcp:nothing", "unix:"}) {
    PeerAddress peer{.identity = Worker::settings_of(3).handshake.me, .addresses = {address}};
    a.engine->set_peer(peer);
    o = a.call(3, {});
    CHECK(o.status == CallStatus::kUnreachable);
    CHECK_SAYS(o.why, address);
    a.start(3, 1, {});
    a.completion_count.wait_for(1);
    CHECK(a.completions.at(1).status == CallStatus::kUnreachable);
    CHECK_SAYS(a.completions.at(1).why, address);
    a.completions.clear();
    a.completion_count.add(-1);
  }
}

/// Accepts a connection, without a handshake.
void accept_only(Puppet& p) {
  do {
    readable(p.listener->fd());
    p.link = p.listener->accept();
  } while (!p.link);
}

/// The call fails at once: it does not wait for connect_timeout.
CASE(a_peer_that_violates_the_handshake_is_not_dialed_again) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {}); });
  accept_only(p);
  Message bad = message(FrameType::kChallenge);
  bad.header.magic = 5;
  p.send(bad);
  caller.join();
  CHECK(completion.status == CallStatus::kUnreachable);
  CHECK_SAYS(completion.why, "cannot reach worker w1");
  CHECK_SAYS(completion.why, "not a Telegrad frame");
  CHECK(completion.loss == Loss::kOther);
}

/// A call that has waited for connect_timeout gets the reason of the last attempt.
CASE(a_peer_that_closes_a_connection_in_the_handshake) {
  Settings s;
  s.connect_timeout = 5 * kMillisecond;
  Worker a(0, s);
  Puppet p(1);
  a.engine->set_peer(p.address());
  Request news{.body = "news"};
  CHECK(a.engine->send(1, compose(news)));  // it waits without limit
  accept_only(p);
  RecordingInbox inbox;
  receive_until(*p.link, inbox, 1);  // else the end would be a reset
  p.link.reset();
  accept_only(p);
  const Completion o = a.call(1, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_SAYS(o.why, "within connect_timeout: cannot reach worker w1");
  CHECK(o.loss == Loss::kClosed);
}

/// The dial that a fault rule cuts is transient, as one that the network cuts.
CASE(a_dial_that_is_cut_is_made_again) {
  Settings s = Worker::settings_of(0);
  s.faults = std::make_shared<Faults>("w0", 1);
  s.faults->add({.action = FaultAction::kCut, .types = 1u << static_cast<int>(FrameType::kHello), .count = 3});
  Worker a(0, s), b(1);
  introduce({&a, &b}, "unix");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_EQ(s.faults->applied().size(), 3u);
}

CASE(an_accepted_connection_that_a_rule_cuts_is_logged) {
  Settings s = Worker::settings_of(1);
  s.faults = std::make_shared<Faults>("w1", 1);
  s.faults->add({.action = FaultAction::kCut, .types = 1u << static_cast<int>(FrameType::kChallenge)});
  Worker a(0), b(1, s);
  introduce({&a, &b}, "unix");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_SAYS(b.wait_for_event(EventKind::kLog), "fault rule 0 has cut the connection");
}

CASE(the_next_address_is_tried) {
  Worker a(0), b(1);
  b.listen("tcp");
  PeerAddress address = b.address();
  address.addresses = {"carrier-pigeon:x", "unix:@telegrad-test-none", "tcp:127.0.0.1:1", address.addresses[0]};
  a.engine->set_peer(address);
  for (int i = 0; i < 3; ++i) CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK_EQ(a.engine->stats().connections, 1u);
}

/// A failed call must reach the pool although the leader is a caller that sleeps in epoll.
CASE(a_completion_does_not_wait_for_the_polling_caller) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  std::thread caller([&] { a.call(1, {.tag = kHold}); });
  b.handled.wait_for(1);
  for (int i = 0; i < 5; ++i) {
    a.start(9, i, {});
    a.completion_count.wait_for(i + 1);
    CHECK(a.completions.at(i).status == CallStatus::kUnreachable);
  }
  b.release.set();
  caller.join();
}

/// A listener with a full backlog that never accepts.
struct FullListener {
  FullListener() {
    address = fresh_address("unix");
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string path = address.substr(5);
    std::memcpy(name.sun_path, path.data(), path.size());
    name.sun_path[0] = 0;
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
    listening = UniqueFd(socket(AF_UNIX, SOCK_STREAM, 0));
    CHECK_EQ(bind(listening.get(), reinterpret_cast<sockaddr*>(&name), size), 0);
    CHECK_EQ(listen(listening.get(), 0), 0);
    filling = UniqueFd(socket(AF_UNIX, SOCK_STREAM, 0));
    CHECK_EQ(connect(filling.get(), reinterpret_cast<sockaddr*>(&name), size), 0);
  }
  std::string address;
  UniqueFd listening, filling;
};

CASE(a_listener_with_a_full_backlog) {
  FullListener full;
  Settings s;
  s.connect_timeout = 30 * kMillisecond;
  Worker a(0, s);
  a.engine->set_peer({.identity = Worker::settings_of(1).handshake.me, .addresses = {full.address}});
  const Completion o = a.call(1, {});
  CHECK(o.status == CallStatus::kUnreachable);
  CHECK_SAYS(o.why, full.address);
  a.start(1, 1, {});
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(1).status == CallStatus::kUnreachable);
}

CASE(removing_a_peer_fails_callers_that_wait_for_a_connection) {
  FullListener full;
  Worker a(0);
  a.engine->set_peer({.identity = Worker::settings_of(1).handshake.me, .addresses = {full.address}});
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {}); });
  while (a.engine->stats().pending_calls == 0) std::this_thread::yield();
  a.engine->remove_peer(1, "it has left the group");
  caller.join();
  CHECK(completion.status == CallStatus::kUnreachable);
  CHECK_EQ(completion.why, "it has left the group");
  CHECK_EQ(a.call(1, {}).why, "it has left the group");
}

CASE(a_call_given_up_before_the_connection_is_not_made) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  CHECK(a.call(1, {.body = "too late", .timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
  std::thread puppet([&] {
    p.accept();
    const Incoming m = p.receive();
    CHECK_EQ(std::string(m.body_view()), "in time");
    p.reply(m, "yes");
  });
  CHECK_EQ(body_of(a.call(1, {.body = "in time"})), "yes");
  puppet.join();
}

/// Both ends get an event for the first connection to a peer, and for the first one after a loss.
CASE_ON_EVERY_SCHEME(the_first_connection_is_an_event) {
  Worker a(0);
  auto b = std::make_unique<Worker>(1);
  introduce({&a, b.get()}, scheme);
  for (int i = 0; i < 3; ++i) CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  for (Worker* w : {&a, b.get()}) w->link_count.wait_for(1);
  CHECK(a.links[0].starts_with("w1 to " + scheme));
  CHECK_EQ(b->links[0], "w0 from " + scheme + (scheme == "tcp" || scheme == "tls" ? ":127.0.0.1" : ""));
  b->stop();
  a.wait_for_event(EventKind::kPeerLeft);
  b = std::make_unique<Worker>(1);
  b->listen(scheme);
  a.meet(*b);
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  a.link_count.wait_for(2);
  a.stop();
  CHECK_EQ(a.link_count.value(), 2);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

// Lanes between workers: how they are opened, which connections may become one, and the calls of a link with a broken
// lane.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings with_lanes(int id, std::uint32_t lanes) {
  Settings s = Worker::settings_of(id);
  s.handshake.lanes = lanes;
  return s;
}

const std::string kTensor = [] { return Random(1).bytes(std::size_t{5} << 20); }();

void echo_large(Worker& from, int to) {
  const Completion o = from.call(to, {.body = "x", .segments = {kTensor}});
  CHECK_EQ(body_of(o), "x");
  CHECK(text_of(o.reply.segments[0]) == kTensor);
}

/// Calls until both ends have this number of lanes, which are opened in the background.
void call_until_lanes(Worker& a, Worker& b, std::size_t lanes) {
  while (a.engine->stats().lanes < lanes || b.engine->stats().lanes < lanes) echo_large(a, b.id);
}

CASE(links_with_large_messages_get_lanes) {
  for (const bool callee_connects : {false, true}) {
    Worker a(0, with_lanes(0, 4)), b(1, with_lanes(1, 3));
    introduce({&a, &b}, "tcp");
    if (callee_connects) CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
    CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    echo_large(a, 1);  // too little for lanes
    CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    for (Worker* w : {&a, &b}) CHECK(w->engine->stats().lanes == 0 && w->engine->stats().connections == 1);
    call_until_lanes(a, b, 2);
    for (int i = 0; i < times(20); ++i) echo_large(a, 1);  // over one connection, two, and all
    CHECK_EQ(a.engine->stats().lanes, 2u);
    CHECK_EQ(a.engine->stats().connections, 1u);
    CHECK_EQ(b.engine->stats().connections, 1u);
  }
}

CASE(a_worker_with_one_lane_opens_no_more) {
  Worker a(0, with_lanes(0, 4)), b(1, with_lanes(1, 1));
  introduce({&a, &b}, "tcp");
  for (int i = 0; i < 10; ++i) echo_large(a, 1);
  CHECK_EQ(a.engine->stats().lanes + b.engine->stats().lanes, 0u);
}

CASE(a_process_with_few_descriptors_opens_no_lanes) {
  Worker a(0, with_lanes(0, 4)), b(1, with_lanes(1, 4));
  introduce({&a, &b}, "tcp");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{.rlim_cur = 15, .rlim_max = before.rlim_max};  // less than four for each lane
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (int i = 0; i < 10; ++i) echo_large(a, 1);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK_EQ(a.engine->stats().lanes, 0u);
  a.stop();
  std::lock_guard lock(a.mutex);
  CHECK(a.events.empty());  // there was no attempt
}

CASE(many_callers_over_lanes) {
  Worker a(0, with_lanes(0, 4), 4), b(1, with_lanes(1, 4), 4);
  introduce({&a, &b}, "tcp");
  call_until_lanes(a, b, 3);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < times(6); ++i) echo_large(t % 2 ? a : b, t % 2 ? 1 : 0);
      for (int i = 0; i < 100; ++i) CHECK_EQ(body_of((t % 2 ? a : b).call(t % 2 ? 1 : 0, {.body = "s"})), "s");
    });
  }
  for (auto& t : callers) t.join();
}

/// The sender may change its tensor as soon as an asynchronous call returns.
CASE(a_tensor_sent_over_lanes_may_change_afterwards) {
  Worker a(0, with_lanes(0, 4)), b(1, with_lanes(1, 4));
  introduce({&a, &b}, "tcp");
  call_until_lanes(a, b, 3);
  for (const bool never_wait : {false, true}) {
    for (int i = 0; i < 8; ++i) {
      std::string tensor = kTensor;
      auto m = std::make_unique<Outgoing>();
      m->header.tag = kEcho;
      m->segments.push_back({reinterpret_cast<const std::byte*>(tensor.data()), tensor.size()});
      CallOptions o;
      o.never_wait = never_wait;
      const std::uint64_t call = a.engine->start(1, std::move(m), std::move(o));
      std::ranges::fill(tensor, 'x');
      Completion completion;
      CHECK(a.engine->wait(call, kNever, {}, completion) == WaitEnd::kDone);
      CHECK(text_of(completion.reply.segments[0]) == kTensor);
    }
  }
}

/// Connects to a worker with a handshake for a lane, until the connection ends or, if it `stays`, until the welcome.
struct Attempt {
  Attempt(const PeerAddress& at, const HandshakeConfig& config, std::string link_name, bool stays = false)
      : link(connect_to(at.addresses[0])),
        handshake(Handshake::initiate(config, at.identity, {}, Purpose::kLane, std::move(link_name))) {
    act(handshake.begin());
    while (!over && !(stays && welcome)) {
      readable(link->fd());
      over = link->receive(inbox, kAnyBudget) == ReceiveState::kBroken;
      for (; !over && read < inbox.messages.size(); ++read) {
        const Incoming& m = inbox.messages[read];
        act(advance(handshake, m.header.type, m.body_view()));
      }
    }
  }
  void act(const Handshake::Step& step) {
    welcome = welcome || step.open;
    if (!step.send) return;
    const Message m = message(*step.send, step.body);
    Outgoing out = m.outgoing();
    SendState state;
    while ((state = link->send(out)) == SendState::kBlocked) writable(link->fd());
    over = state == SendState::kBroken;
  }
  std::unique_ptr<Link> link;
  Handshake handshake;
  RecordingInbox inbox;
  std::size_t read = 0;
  bool over = false, welcome = false;
};

/// Only the peer of a link can add a lane to it: no unauthenticated process, and no other member.
CASE(only_the_peer_can_add_a_lane) {
  Worker a(0, with_lanes(0, 4));
  a.listen("tcp");
  Puppet p(1, "tcp");
  p.config.lanes = 4;
  p.connect(a.address());
  HandshakeConfig wrong = p.config;
  wrong.secret = "another";
  Attempt intruder(a.address(), wrong, std::string(32, 's'));
  CHECK(!intruder.welcome);
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), "secret does not match");
  Attempt guess(a.address(), p.config, std::string(32, 's'));  // knows the group's secret, but not the link's name
  HandshakeConfig third = Worker::settings_of(2).handshake;
  third.lanes = 4;
  Attempt member(a.address(), third, p.link_name);  // uses the name of another member's link
  CHECK_EQ(a.engine->stats().lanes, 0u);
  p.send(message(FrameType::kRequest, "x", 1));
  Message request = message(FrameType::kRequest, "still here", 2);
  request.header.tag = kEcho;
  p.send(request);
  CHECK_EQ(std::string(p.receive().body_view()), "still here");
  a.stop();
  std::lock_guard lock(a.mutex);
  CHECK_EQ(std::ranges::count_if(a.events,
                                 [](const WorkItem& e) { return e.text.ends_with("it is a lane of an unknown link"); }),
           2);
}

CASE(no_more_lanes_than_both_ends_want) {
  for (const auto& [mine, theirs] : {std::pair{2u, 4u}, std::pair{4u, 2u}}) {
    Worker a(0, with_lanes(0, mine));
    a.listen("tcp");
    Puppet p(1, "tcp");
    p.config.lanes = theirs;
    p.connect(a.address());
    Attempt first(a.address(), p.config, p.link_name, true), second(a.address(), p.config, p.link_name);
    CHECK(first.welcome);
    CHECK_EQ(a.engine->stats().lanes, 1u);
    CHECK_SAYS(a.wait_for_event(EventKind::kLog), "it is a lane of an unknown link");
  }
}

CASE(a_broken_lane_fails_the_calls_of_its_link) {
  Worker a(0, with_lanes(0, 2)), b(1, with_lanes(1, 2));
  introduce({&a, &b}, "tcp");
  const int before = open_descriptors();
  call_until_lanes(a, b, 1);
  a.start(1, 1, {.tag = kHold, .body = "held"});
  b.handled.wait_for(b.handled.value());
  // The last two sockets of this process are the lane's ends.
  for (int fd = before + 100; fd > 2; --fd) {
    int type = 0;
    socklen_t size = sizeof type;
    sockaddr_storage peer;
    socklen_t peer_size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) continue;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) continue;
    CHECK_EQ(::shutdown(fd, SHUT_RDWR), 0);
    break;
  }
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(1).status == CallStatus::kPeerLost);
  b.release.set();
  echo_large(a, 1);  // over a new link
}

CASE(descriptors_of_lanes_are_closed) {
  const int before = open_descriptors();
  {
    Worker a(0, with_lanes(0, 4)), b(1, with_lanes(1, 4));
    introduce({&a, &b}, "tcp");
    call_until_lanes(a, b, 3);
  }
  CHECK_EQ(open_descriptors(), before);
  CHECK_EQ(Bytes::live.load(), 0);
}

}  // namespace
}  // namespace telegrad::test

// Snapshots: what an engine shows of its calls, requests, sessions and connections.
#include <algorithm>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

using State = RequestSnapshot::State;

Settings one_handler() {
  Settings s;
  s.handlers = 1;
  return s;
}

Snapshot snapshot(Worker& w) {
  return w.engine->snapshot([](std::uint64_t, const KeepAlive&) {});
}

const RequestSnapshot& request(const Snapshot& s, State state) {
  const auto found = std::ranges::find(s.requests, state, &RequestSnapshot::state);
  CHECK(found != s.requests.end());
  return *found;
}

const PeerSnapshot& peer(const Snapshot& s, std::int32_t id) {
  const auto found = std::ranges::find(s.peers, id, &PeerSnapshot::id);
  CHECK(found != s.peers.end());
  return *found;
}

CASE(calls_with_their_names_and_targets) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const Nanos before = now();
  const std::uint64_t call = a.start(1, 5, {.tag = kHold, .name_id = 3, .name = "f"});
  b.handled.wait_for(1);
  int target = -1;
  const Snapshot s = a.engine->snapshot([&](std::uint64_t id, const KeepAlive& of) {
    CHECK_EQ(id, call);
    target = std::stoi(static_cast<const Bytes&>(of).body);
  });
  CHECK_EQ(target, 5);
  CHECK_EQ(s.calls.size(), 1u);
  CHECK_EQ(s.calls[0].id, call);
  CHECK_EQ(s.calls[0].peer, 1);
  CHECK_EQ(s.calls[0].name_id, 3u);
  CHECK_EQ(s.calls[0].connection, peer(s, 1).connection);
  CHECK(before <= s.calls[0].since && s.calls[0].since <= s.at);
  b.release.set();
  a.completion_count.wait_for(1);
  CHECK(snapshot(a).calls.empty());
}

CASE(a_call_without_a_connection_waits) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());  // it does not accept
  a.start(1, 0, {});
  const Snapshot s = snapshot(a);
  CHECK_EQ(s.calls[0].connection, 0u);
  CHECK_EQ(peer(s, 1).connection, 0u);
  CHECK(peer(s, 1).connecting);
  CHECK_EQ(peer(s, 1).pending, 1u);
  CHECK_EQ(s.connections.size(), 1u);
  CHECK(!s.connections[0].open);
}

CASE(requests_that_run_and_that_are_queued) {
  Worker a(0), b(1, one_handler());
  introduce({&a, &b}, "unix");
  const Nanos before = now();
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  a.start(1, 1, {.timeout = 60 * kSecond, .name_id = 4, .name = "g"});
  while (b.engine->stats().queued_requests == 0) std::this_thread::yield();
  const Snapshot s = snapshot(b);
  CHECK_EQ(s.requests.size(), 2u);
  for (const RequestSnapshot& r : s.requests) {
    CHECK_EQ(r.peer, 0);
    CHECK_EQ(r.connection, peer(s, 0).connection);
    CHECK(before <= r.since && r.since <= s.at);
  }
  const RequestSnapshot& queued = request(s, State::kQueued);
  CHECK_EQ(queued.name, "g");
  CHECK(s.at < queued.deadline && queued.deadline <= s.at + 60 * kSecond);
  const RequestSnapshot& running = request(s, State::kRunning);
  CHECK(b.engine->find_request(running.connection, running.call)->since == running.since);
  CHECK(!b.engine->find_request(queued.connection, queued.call));
  b.release.set();
  a.completion_count.wait_for(2);
  CHECK(snapshot(b).requests.empty());
}

/// Parks a request, which keeps its caller, its time and its name; also one that cannot be canceled.
CASE(requests_without_a_thread) {
  for (const std::uint16_t flags : {std::uint16_t{0}, std::uint16_t{kMustRun}}) {
    Worker a(0), b(1);
    introduce({&a, &b}, "unix");
    WorkItem kept;
    Event taken;
    b.on_custom = [&](WorkItem& item) {
      const auto running = b.engine->find_request(item.connection, item.message.header.call_id);
      b.engine->park(item);
      const auto parked = b.engine->find_request(item.connection, item.message.header.call_id);
      CHECK(running->state == State::kRunning && parked->state == State::kParked);
      CHECK_EQ(parked->since, running->since);
      CHECK_EQ(parked->peer, 0);
      CHECK_EQ(parked->name, "h");
      kept = std::move(item);
      taken.set();
    };
    const std::uint64_t call = a.start(1, 0, {.tag = kCustom, .flags = flags, .name_id = 5, .name = "h"});
    taken.wait();
    CHECK(request(snapshot(b), State::kParked).call == kept.message.header.call_id);
    WorkItem canceled;
    CHECK(a.engine->cancel(call, canceled));
    a.start(1, 1, {});
    a.completion_count.wait_for(1);  // so the frame of the cancellation has arrived
    CHECK(b.engine->detach(kept.connection, kept.message.header.call_id, true) == (flags == 0));
    CHECK(b.engine->find_request(kept.connection, kept.message.header.call_id)->state == State::kDeferred);
    b.answer(kept, "done");
    CHECK(!b.engine->find_request(kept.connection, kept.message.header.call_id));
  }
}

CASE(sessions_and_their_connections) {
  Worker a(0), b(1);
  introduce({&a, &b}, "tcp");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  a.engine->set_epoch(1, 7);
  const Snapshot here = snapshot(a), there = snapshot(b);
  CHECK_EQ(peer(here, 1).name, "w1");
  CHECK_EQ(peer(here, 1).incarnation, 1001u);
  CHECK_EQ(peer(here, 1).epoch, 7);
  CHECK_EQ(here.connections.size(), 1u);
  const ConnectionSnapshot& mine = here.connections[0];
  CHECK_EQ(mine.id, peer(here, 1).connection);
  CHECK_EQ(mine.peer, 1);
  CHECK(mine.open && mine.initiator && !mine.stalled);
  CHECK(mine.address.starts_with("tcp:"));
  CHECK(!there.connections[0].initiator);
  CHECK_EQ(there.connections[0].peer, 0);
  b.stop();
  a.event_count.wait_for(1);
  CHECK_EQ(peer(snapshot(a), 1).connection, 0u);
  CHECK_EQ(peer(snapshot(a), 1).last_error, "it shut down");
}

}  // namespace
}  // namespace telegrad::test

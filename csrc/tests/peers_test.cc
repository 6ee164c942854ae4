// The peers: messages to those that cannot be reached, and news that are out of date. Without connections;
// engine_*_test have those.
#include "core/peers.h"

#include "core/engine_parts.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

struct Calling {
  /// Makes a call and returns how it has ended; kPending if it waits.
  Completion call(std::int32_t peer, std::int64_t epoch = kAnyEpoch) {
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kRequest;
    m->epoch = epoch;
    {
      Lock lock(parts.mutex);
      CallOptions options;
      id = parts.calls.open(peer, m->header, now(), options);
    }
    m->header.call_id = id;
    Transmission p;
    parts.sender.route(peer, m, p);
    return state();
  }
  Completion state() {
    Lock lock(parts.mutex);
    Call* call = parts.calls.find(id);
    return call->status == CallStatus::kPending ? Completion{} : std::move(call->completion);
  }
  void set_peer(std::int32_t peer, std::uint64_t incarnation, std::vector<std::string> addresses = {}) {
    parts.peers.set_peer({.identity = {.id = peer, .name = "w1", .incarnation = incarnation}, .addresses = addresses});
  }

  EngineParts parts{Settings{}};
  std::uint64_t id = 0;
};

CASE(a_call_to_an_unknown_peer_fails) {
  Calling c;
  const Completion ended = c.call(7);
  CHECK(ended.status == CallStatus::kUnreachable);
  CHECK_SAYS(ended.why, "no such worker");
}

CASE(a_call_to_a_peer_without_an_address_fails) {
  Calling c;
  c.set_peer(1, 1);
  const Completion ended = c.call(1);
  CHECK(ended.status == CallStatus::kUnreachable);
  CHECK_SAYS(ended.why, "its address is unknown");
}

CASE(an_address_of_no_transport_is_named) {
  Calling c;
  c.set_peer(1, 1, {"pigeon:1"});
  CHECK_SAYS(c.call(1).why, "no transport for the address pigeon:1");
}

CASE(a_removed_peer_keeps_the_reason) {
  Calling c;
  c.set_peer(1, 2, {"pigeon:1"});
  c.parts.peers.remove_peer(1, "it has left", 1);  // news of an older process
  CHECK_SAYS(c.call(1).why, "no transport");
  c.parts.peers.remove_peer(1, "it has left", 2);
  CHECK_EQ(c.call(1).why, "it has left");
  {
    Lock lock(c.parts.mutex);
    CHECK_EQ(c.parts.peers.count(), 0u);
  }
  c.set_peer(1, 3, {"pigeon:2"});
  CHECK_SAYS(c.call(1).why, "pigeon:2");
  c.set_peer(1, 2, {"pigeon:3"});  // news that are out of date
  CHECK_SAYS(c.call(1).why, "pigeon:2");
}

CASE(a_message_of_an_ended_session_is_not_sent) {
  Calling c;
  c.set_peer(1, 1, {"pigeon:1"});
  c.parts.peers.set_epoch(1, 5);
  CHECK(c.call(1, 4).status == CallStatus::kPeerLost);
  CHECK(c.call(1, 5).status == CallStatus::kUnreachable);
}

}  // namespace
}  // namespace telegrad::test

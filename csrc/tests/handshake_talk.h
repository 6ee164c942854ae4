// Helpers of the handshake tests: two ends, and the frames between them.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "core/handshake.h"
#include "tests/workers.h"

namespace telegrad::test {

inline const Identity kAlice{.id = 1, .name = "alice", .incarnation = 11};
inline const Identity kBob{.id = 2, .name = "bob", .incarnation = 22};

inline HandshakeConfig config(const Identity& me, std::string secret = "secret", std::string group = "group") {
  return {.me = me, .group = std::move(group), .secret = std::move(secret)};
}

struct Frame {
  FrameType type;
  std::string body;
};

inline Frame frame_of(const Handshake::Step& step) {
  CHECK(step.send.has_value());
  return {*step.send, step.body};
}

inline void check_failed(const Handshake::Step& step, const std::string& why) {
  CHECK(!step.open);
  CHECK_SAYS(step.failed, why);
  const bool refused =
      step.failed.starts_with("refused by the peer") || step.failed == "the group's secret does not match";
  CHECK_EQ(step.code == kRefusalCode, refused);
}

/// Alice and Bob; the test passes each frame between them.
struct Talk {
  explicit Talk(HandshakeConfig a = config(kAlice), HandshakeConfig b = config(kBob), Identity target = kBob,
                const SessionOffer& offer = {})
      : alice_config(std::move(a)),
        bob_config(std::move(b)),
        alice(Handshake::initiate(alice_config, target, offer)),
        bob(Handshake::accept(bob_config)) {}

  HandshakeConfig alice_config, bob_config;
  Handshake alice, bob;
};

/// The frames of a whole handshake, with the two ends as they were before each.
struct Recording {
  explicit Recording(Talk& t) {
    Frame next = frame_of(t.alice.begin());
    hello = keep(t, next);
    challenge = keep(t, next = frame_of(advance(t.bob, next.type, next.body)));
    proof = keep(t, next = frame_of(advance(t.alice, next.type, next.body)));
    answer = keep(t, next = frame_of(advance(t.bob, next.type, next.body)));
    confirm = keep(t, next = frame_of(advance(t.alice, next.type, next.body)));
  }
  Frame keep(const Talk& t, const Frame& frame) {
    before.push_back(t);
    return frame;
  }
  Frame hello, challenge, proof, answer, confirm;
  std::vector<Talk> before;  // the receiver of each frame has not got it yet
};

/// Runs the handshake to its end and returns the last step of both ends.
inline std::pair<std::string, std::string> run(Talk& t) {
  std::string alice_came_to, bob_came_to;
  std::deque<std::pair<bool, Frame>> flying{{true, frame_of(t.alice.begin())}};  // true: to Bob
  while (!flying.empty()) {
    auto [to_bob, f] = std::move(flying.front());
    flying.pop_front();
    std::string& came_to = to_bob ? bob_came_to : alice_came_to;
    if (!came_to.empty() && came_to != "open") continue;
    const Handshake::Step step = advance(to_bob ? t.bob : t.alice, f.type, f.body);
    if (step.send) flying.emplace_back(!to_bob, frame_of(step));
    if (step.open) came_to = "open";
    if (!step.failed.empty()) came_to = step.failed;
  }
  return {alice_came_to, bob_came_to};
}

}  // namespace telegrad::test

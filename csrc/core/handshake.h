// Mutual authentication of two workers, before anything else is looked at.
//
//     initiator                               acceptor
//     HELLO      version, group, me, you, nonce, limits, lanes, session ->
//                <- CHALLENGE   me, nonce, limits, lanes, mac("acceptor" + HELLO + all of these)
//     PROOF      mac("initiator" + HELLO + CHALLENGE) ->
//                <- WELCOME
//
// Either may answer REFUSE and a reason. The mac is HMAC-SHA256 keyed with the group's secret; both nonces and both
// identities are under it, so a recorded exchange proves nothing and a proof for one worker is none for another.
//
// Both ends say what a message to them may be at most (core/limits.h): a sender keeps to it.
//
// Both ends say how many lanes a link of theirs may have; the lower number counts. What is under the mac also names the
// link, to both ends and to nobody else (`session`). A connection that is to be a lane of it goes through a handshake
// of its own and says in its greeting of which: so it is from the worker it says it is from, and for that link. A pure
// state machine: bytes in, bytes out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/message.h"

namespace telegrad {

struct Identity {
  std::int32_t id = -1;
  std::string name;
  std::uint64_t incarnation = 0;
};

struct Credo {  // what this worker goes into every handshake with
  Identity me;
  std::string group;
  std::string secret;
  Limits limits;            // of what it takes
  std::uint32_t lanes = 1;  // connections of one link, at most
};

class Handshake {
 public:
  struct Step {
    std::optional<FrameType> send;  // a frame to send, with this body
    std::string body;
    bool open = false;   // both ends are proven
    std::string failed;  // not empty: the link must be closed, for this reason
  };

  /// The initiating side; `target` is whom it wants to reach. `session`: of the link that this is to be a lane of.
  static Handshake initiate(const Credo& credo, const Identity& target, std::string session = {});
  static Handshake accept(const Credo& credo);

  /// Initiator only: the first frame.
  Step begin();
  Step on_frame(FrameType type, std::string_view body);

  /// Who is at the other end; valid once open.
  const Identity& peer() const { return peer_; }
  /// What a message to the other end may be at most; valid once open.
  const Limits& limits() const { return limits_; }
  /// How many connections the link may have, this one included.
  std::uint32_t lanes() const { return lanes_; }
  /// What the link is called by both ends, and by nobody who does not know the secret. For a lane, that of its link;
  /// `for_lane` then.
  const std::string& session() const { return session_; }
  bool for_lane() const { return for_lane_; }

 private:
  enum class State { kStart, kSentHello, kSentChallenge, kSentProof, kOpen, kFailed };

  explicit Handshake(const Credo& credo) : credo_(&credo) {}
  Step on_hello(std::string_view body);
  Step on_challenge(std::string_view body);
  Step on_proof(std::string_view body);
  Step refuse(std::string why);
  Step fail(std::string why);
  std::string mac(std::string_view label, std::string_view transcript) const;
  void open();

  const Credo* credo_;
  State state_ = State::kStart;
  Identity peer_;
  std::string hello_;
  std::string transcript_;
  Limits limits_;
  std::uint32_t lanes_ = 1;
  std::string session_;
  bool for_lane_ = false;
};

}  // namespace telegrad

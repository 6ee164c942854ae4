// Mutual authentication of two workers, before any other frame is processed.
//
//     initiator                               acceptor
//     HELLO      version, group, me, you, nonce, limits, lanes, session ->
//                <- CHALLENGE   me, nonce, limits, lanes, mac("acceptor" + HELLO + all of these)
//     PROOF      mac("initiator" + HELLO + CHALLENGE) ->
//                <- WELCOME
//
// Either end may answer REFUSE with a reason. The mac is HMAC-SHA256 keyed with the group's secret. It covers both
// nonces and both identities, so a recorded handshake cannot be replayed, and the proof of one worker is not valid for
// another.
//
// Both ends send their limits for received messages (core/limits.h); senders observe them.
//
// Both ends send the highest number of lanes per link; the lower number is used. The mac also derives a name of the
// link that only the two ends know (`session`). A connection that is to become a lane has a handshake of its own and
// sends the session of its link in HELLO. This proves the identity of its peer and its link. A pure state machine:
// bytes in, bytes out.
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

struct HandshakeConfig {  // this worker's part of every handshake
  Identity me;
  std::string group;
  std::string secret;
  Limits limits;            // of messages to this worker
  std::uint32_t lanes = 1;  // connections of one link, at most
};

class Handshake {
 public:
  struct Step {
    std::optional<FrameType> send;  // a frame to send, with this body
    std::string body;
    bool open = false;   // both ends are authenticated
    std::string failed;  // not empty: the reason for which the link must be closed
  };

  /// Makes the initiating side of a connection to `target`. `session`: of the link for which this is to become a lane.
  static Handshake initiate(const HandshakeConfig& config, const Identity& target, std::string session = {});
  static Handshake accept(const HandshakeConfig& config);

  /// Initiator only: the first frame.
  Step begin();
  Step on_frame(FrameType type, std::string_view body);

  /// Returns the identity of the other end; valid once open.
  const Identity& peer() const { return peer_; }
  /// Returns the limits of messages to the other end; valid once open.
  const Limits& limits() const { return limits_; }
  /// Returns how many connections the link may have, including this one.
  std::uint32_t lanes() const { return lanes_; }
  /// Returns the name of the link, which only both ends can compute because it needs the secret. A lane (`for_lane`)
  /// has the session of its link.
  const std::string& session() const { return session_; }
  bool for_lane() const { return for_lane_; }

 private:
  enum class State { kStart, kSentHello, kSentChallenge, kSentProof, kOpen, kFailed };

  explicit Handshake(const HandshakeConfig& config) : config_(&config) {}
  Step on_hello(std::string_view body);
  Step on_challenge(std::string_view body);
  Step on_proof(std::string_view body);
  Step refuse(std::string why);
  Step fail(std::string why);
  std::string mac(std::string_view label, std::string_view transcript) const;
  void open();

  const HandshakeConfig* config_;
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

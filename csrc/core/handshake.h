// Mutual authentication of two workers, before any other frame is processed.
//
//     initiator                               acceptor
//     HELLO      version, group, me, you, nonce, limits, lanes, resume, offer, purpose, link ->
//                <- CHALLENGE   nonce
//     PROOF      mac("initiator" + HELLO + CHALLENGE) ->
//                <- ANSWER      me, limits, lanes, resume, mac("acceptor" + HELLO + CHALLENGE + all of these)
//     CONFIRM    received, mac("confirm" + HELLO + CHALLENGE + ANSWER + received) ->
//                <- WELCOME     received
//
// The initiator proves itself first: an unauthenticated peer gets a nonce, and no mac with which it could search for
// the secret. Either end may answer REFUSE. One that has not proven itself gets the word kRefused and nothing else; the
// reason is only logged. One that has proven itself gets the reason, with a mac("refuse" + reason + HELLO + ...). Each
// end stops once the other is authenticated (`Step::proven`): the engine then decides whether the session may open
// (core/session.h). The mac is HMAC-SHA256 keyed with the group's secret. It covers both nonces and both identities, so
// a recorded handshake cannot be replayed, and the proof of one worker is not valid for another.
//
// Both ends send their limits for received messages (core/limits.h); senders observe them.
//
// Both ends send the highest number of lanes per link; the lower number is used. The mac also derives a name of the
// link that only the two ends know (`link`). A connection that is to become a lane of a link, or to continue it after
// its connection has broken, has a handshake of its own and sends the name of the link in HELLO. This proves the
// identity of its peer and its link. To continue a link, both ends send how many of its messages have arrived
// (`received`, else 0). Links are continued if both ends want it (`resume`). A pure state machine: bytes in, bytes out.
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/message.h"
#include "core/session.h"

namespace telegrad {

inline constexpr std::string_view kRefused = "refused";  // the reason that an unauthenticated peer gets

inline constexpr std::uint64_t kAnyIncarnation = ~std::uint64_t{0};  // as an upper limit

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
  bool resume = false;      // a link outlives its connection, if the peer wants it too
};

/// The use of a connection.
enum class Purpose : std::uint8_t {
  kSession,  // a link of its own, which may become the session of the two workers
  kLane,     // a lane of a link
  kResume,   // the continuation of a link
};

class Handshake {
 public:
  struct Step {
    std::optional<FrameType> send;  // a frame to send, with this body
    std::string body;
    bool proven = false;  // the other end is authenticated: `proceed` follows, or `refuse`
    bool open = false;    // both ends are authenticated, and agree
    std::string failed;   // not empty: the reason for which the link must be closed,
    int code = EPROTO;    // and its code, see LinkError
  };

  /// Makes the initiating side of a connection to `target`. `link`: the name of an earlier link, unless the purpose is
  /// a session.
  static Handshake initiate(const HandshakeConfig& config, const Identity& target, const SessionOffer& offer,
                            Purpose purpose = Purpose::kSession, std::string link = {});
  static Handshake accept(const HandshakeConfig& config);

  /// Initiator only: the first frame.
  Step begin();
  Step on_frame(FrameType type, std::string_view body);
  /// After `proven`: the initiator confirms, the acceptor opens the connection. `received`: the messages that have
  /// arrived, to continue a link.
  Step proceed(std::uint64_t received = 0);
  /// Rejects the other end, which has proven itself, and gives it the reason.
  Step refuse(OfferAnswer answer, std::string why);

  /// Returns the identity of the other end; valid once proven.
  const Identity& peer() const { return peer_; }
  /// Acceptor, once proven: returns the session that the initiator offers.
  const SessionOffer& offer() const { return offer_; }
  /// Initiator: returns the answer of the acceptor, which has proven itself; kAccept unless it has refused.
  OfferAnswer answer() const { return answer_; }
  /// Returns the limits of messages to the other end; valid once proven.
  const Limits& limits() const { return limits_; }
  /// Returns how many connections the link may have, including this one.
  std::uint32_t lanes() const { return lanes_; }
  /// Returns the name of the link, which only both ends can compute because it needs the secret. A lane (`for_lane`)
  /// or a continuation has the name of its link.
  const std::string& link() const { return link_; }
  Purpose purpose() const { return purpose_; }
  bool for_lane() const { return purpose_ == Purpose::kLane; }
  /// Returns whether both ends want links to outlive their connections; valid once proven.
  bool resumes() const { return resumes_; }
  /// Returns how many messages of a continued link have arrived at the other end; valid once open, at the acceptor once
  /// proven.
  std::uint64_t received() const { return received_; }

 private:
  enum class State {
    kStart,
    kSentHello,
    kSentChallenge,
    kSentProof,
    kSentAnswer,
    kProven,
    kSentConfirm,
    kOpen,
    kFailed
  };

  explicit Handshake(const HandshakeConfig& config) : config_(&config) {}
  Step on_hello(std::string_view body);
  Step on_challenge(std::string_view body);
  Step on_proof(std::string_view body);
  Step on_answer(std::string_view body);
  Step on_confirm(std::string_view body);
  Step on_welcome(std::string_view body);
  Step on_refuse(std::string_view body);
  Step refuse_unauthenticated(std::string why);
  Step refuse_wrong_secret();
  Step fail(std::string why);
  std::string mac(std::string_view label, std::string_view transcript) const;
  void open();

  const HandshakeConfig* config_;
  bool initiator_ = false;
  State state_ = State::kStart;
  Identity peer_;
  Identity wanted_;  // acceptor: the worker that the initiator wants
  std::string hello_;
  std::string transcript_;  // of the frames so far, for the macs
  Limits limits_;
  std::uint32_t lanes_ = 1;
  SessionOffer offer_;
  OfferAnswer answer_ = OfferAnswer::kAccept;
  std::string link_;
  Purpose purpose_ = Purpose::kSession;
  bool resumes_ = false;
  std::uint64_t received_ = 0;
};

}  // namespace telegrad

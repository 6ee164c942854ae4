// Agreement of two workers on their session: which of their connections carries messages. A pure state machine, one per
// peer, without clock, threads or I/O; csrc/tests/session_test.cc explores it.
//
// A session is the time in which two incarnations exchange messages. It begins when both ends of a handshake open, and
// each end notices its end once. A pair has at most one session at a time, so messages are lost only with the session
// that carries them, and both ends get to know it.
//
// Each end numbers its own dials. A dial offers a session: its number, and the last session that its end has had with
// the peer. The acceptor decides once the initiator has proven its identity:
//     a newer one was accepted    outdated
//     no session, no dial         accept
//     its own dial is under way   accept, and give up its own; but if it has the lower id and has confirmed, the
//                                 peer may have accepted: busy
//     a session of the peer       the peer has given it up: end it, accept
//     a session of its own        the peer has ended it if the offer names it as the last: end it, accept. Else the
//                                 offer was made before the peer accepted that session: busy
// Incarnations are ordered. A newer one ends the sessions of the older, which is stale from then on.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

namespace telegrad {

/// Names a session of a pair: the dial that it came from. No session has number 0.
struct SessionId {
  bool mine = false;  // this end has dialed
  std::uint64_t number = 0;
  bool operator==(const SessionId&) const = default;
};

/// Offer of a session, with a dial. `previous` as the initiator sees it.
struct SessionOffer {
  std::uint64_t number = 0;
  SessionId previous;
};

enum class OfferAnswer : std::uint8_t {
  kAccept,
  kBusy,      // another session is about to open, or open: the initiator need not dial now
  kOutdated,  // a newer dial of this initiator has replaced it
  kStale,     // a newer incarnation has the initiator's name
  kForeign,   // the initiator is no member any more, or its id belongs to another; not from the agreement
  kEnded,     // the session that the initiator wants to continue has ended; not from the agreement
};

/// Decision on an offer. Before the session opens, the present session and the dial under way end where it says so.
struct OfferVerdict {
  OfferAnswer answer = OfferAnswer::kBusy;
  bool ends_session = false;
  bool ends_dial = false;
};

class SessionAgreement {
 public:
  /// `wins`: this end keeps its dial if both dial at once. True at one end only: the one with the lower id.
  explicit SessionAgreement(bool wins) : wins_(wins) {}

  // ---- incarnations

  /// Returns the newest known incarnation of the peer; 0: none.
  std::uint64_t incarnation() const { return incarnation_; }
  /// Records a newer incarnation. Requires that neither a session nor a dial to an older one is left.
  void meet(std::uint64_t incarnation);

  // ---- dials of this end

  bool has_dial() const { return dial_.has_value(); }
  bool has_confirmed() const { return dial_ && dial_->confirmed; }
  /// Begins a dial. Requires that there is neither a dial nor a session.
  SessionOffer dial();
  /// Records that the confirmation is about to be sent to this incarnation, which may open the session at any time from
  /// now on. Returns false if it is stale.
  bool confirm(std::uint64_t incarnation);
  /// Records that the dial has ended without a session.
  void give_up() { dial_.reset(); }
  /// Opens the session of the dial, which the peer has accepted.
  void open_dial();

  // ---- dials of the peer

  /// Decides on the offer of an authenticated initiator.
  OfferVerdict judge(std::uint64_t incarnation, const SessionOffer& offer) const;
  /// Opens the offered session. Requires a verdict of kAccept that ends nothing.
  void accept(std::uint64_t incarnation, const SessionOffer& offer);

  // ---- the session

  bool is_open() const { return session_.number != 0; }
  /// Records the end of the session.
  void end();

  /// Returns everything that decisions depend on, for tests.
  auto state() const {
    return std::tuple(incarnation_, dials_, accepted_, dial_ ? dial_->number : 0, has_confirmed(), session_.mine,
                      session_.number, previous_.mine, previous_.number);
  }

 private:
  struct Dial {
    std::uint64_t number;
    bool confirmed = false;
  };

  const bool wins_;
  std::uint64_t incarnation_ = 0;
  std::uint64_t dials_ = 0;     // of this end
  std::uint64_t accepted_ = 0;  // the newest of the peer that was accepted
  std::optional<Dial> dial_;
  SessionId session_;
  SessionId previous_;
};

}  // namespace telegrad

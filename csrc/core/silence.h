// Judgement of the silence of one peer: when to send a ping, and when the peer is lost. Pure: no clock, no I/O.
//
// Anything that arrives from the peer counts as life, so a busy connection sends no pings. After half an interval of
// silence the peer is sent a ping, and another one an interval later. It is lost once both have gone unanswered for an
// interval. The observer judges itself first: it must have checked in time, and have read its own links since.
// A handshake that continues the session on another connection is no sign of life: messages may be lost all the same.
#pragma once

#include <cstdint>
#include <utility>

#include "base/clock.h"
#include "core/tuning.h"

namespace telegrad {

class Silence {
 public:
  enum class Verdict : std::uint8_t {
    kNone,
    kPing,  // ask the peer for a sign of life
    kPingAgain,
    kRead,  // read the links: an answer may be there
    kLost,
  };

  /// `interval`: see Settings::heartbeat; 0: never lost.
  explicit Silence(Nanos interval) : interval_(interval) {}

  /// Returns how long a peer may be silent at most before it is lost, if checks are `pause` apart.
  static constexpr Nanos limit(Nanos interval) { return 5 * interval / 2 + 4 * pause(interval); }
  /// Returns the time between two checks.
  static constexpr Nanos pause(Nanos interval) { return interval / 10; }

  /// Checks the peer at `at`. `life`: a count that grows with anything that arrives. `reads`: how often this end has
  /// read all its links to the end.
  Verdict check(Nanos at, std::uint64_t life, std::uint64_t reads) {
    if (interval_ == 0) return Verdict::kNone;
    const bool late = at - checked_ > interval_ / 2;  // this process did not run, and did not read what arrived
    checked_ = at;
    if (late || life != life_) {
      life_ = life;
      alive_ = at;
      pings_ = 0;
      reading_ = false;
    }
    const Nanos silent = at - alive_;
    if (pings_ < kUnansweredPings && silent >= (2 * pings_ + 1) * interval_ / 2) {
      return pings_++ == 0 ? Verdict::kPing : Verdict::kPingAgain;
    }
    if (pings_ < kUnansweredPings || silent < (2 * kUnansweredPings + 1) * interval_ / 2) return Verdict::kNone;
    if (!std::exchange(reading_, true)) reads_ = reads;
    return reads >= reads_ + kReadsBeforeLoss ? Verdict::kLost : Verdict::kRead;
  }

  /// Records that another connection continues the session; `life`: including its handshake.
  void resume(std::uint64_t life) { life_ = life; }

  Nanos interval() const { return interval_; }
  /// Returns since when the peer has been silent.
  Nanos since() const { return alive_; }

 private:
  Nanos interval_;
  Nanos checked_ = 0;
  Nanos alive_ = 0;
  std::uint64_t life_ = 0;
  std::uint64_t reads_ = 0;  // when the peer became overdue
  bool reading_ = false;     // it is overdue: only its answer may be unread
  int pings_ = 0;
};

}  // namespace telegrad

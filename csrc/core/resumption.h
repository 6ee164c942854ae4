// When a session continues on another connection after its own has broken. A pure state machine, one per connection
// that carries a session, without clock, threads or I/O; csrc/tests/resumption_test.cc explores it.
//
// The end that dialed the session dials again; the other end waits. Both may notice the break at different times, or
// only one of them: an attempt continues a session that seems to be intact at the acceptor just the same. Attempts have
// numbers, so that one which was delayed in the network does not replace a newer one. The failure detector ends a
// suspended session (core/silence.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "core/tuning.h"

namespace telegrad {

class Resumption {
 public:
  bool is_suspended() const { return suspended_; }

  /// Records that the connection has broken. `oldest` and `waits`: see Resumable::Waiting. Returns false if the session
  /// is to end, because many connections have broken in a row before the oldest message arrived.
  bool suspend(std::uint64_t oldest, bool waits) {
    suspended_ = true;
    const bool moves = !waits || oldest != oldest_;
    oldest_ = oldest;
    broken_ = moves ? 1 : broken_ + 1;
    if (moves) pause_ = 0;
    return broken_ <= kMaxBrokenConnections;
  }

  /// Records that another connection continues the session.
  void resume() { suspended_ = false; }

  /// Returns the pause before the next attempt: none at first, then doubled each time.
  Nanos next_pause(Nanos shortest, Nanos longest) {
    const Nanos pause = pause_;
    pause_ = std::clamp(2 * pause_, shortest, longest);
    return pause;
  }

  /// Returns the number of an attempt that begins.
  std::uint64_t dial() { return ++dialed_; }

  /// Decides on an attempt of the other end. Returns false if a newer one has been accepted.
  bool accept(std::uint64_t number) {
    if (number <= accepted_) return false;
    accepted_ = number;
    return true;
  }

 private:
  bool suspended_ = false;
  int broken_ = 0;  // connections in a row that have broken with the same oldest message
  std::uint64_t oldest_ = UINT64_MAX;
  Nanos pause_ = 0;
  std::uint64_t dialed_ = 0;
  std::uint64_t accepted_ = 0;
};

}  // namespace telegrad

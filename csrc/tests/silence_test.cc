// When a silent peer is sent a ping, and when it is lost.
#include "core/silence.h"

#include <optional>

#include "tests/check.h"

namespace telegrad::test {
namespace {

using Verdict = Silence::Verdict;
constexpr Nanos kInterval = 800, kPause = Silence::pause(kInterval);

/// An observer that checks every kPause, and reads its links each time.
struct Observer {
  Verdict check() { return silence.check(now += kPause, life, ++reads); }
  /// Checks until something is to be done; returns after what time.
  Nanos until(Verdict expected, Nanos start) {
    Verdict verdict;
    do {
      verdict = check();
    } while (verdict == Verdict::kNone || (verdict == Verdict::kRead && expected == Verdict::kLost));
    CHECK(verdict == expected);
    return now - start;
  }
  Silence silence{kInterval};
  Nanos now = 1'000'000;
  std::uint64_t life = 7, reads = 0;
};

CASE(a_silent_peer_gets_two_pings_and_is_lost) {
  Observer o;
  o.check();
  const Nanos start = o.now;
  CHECK_EQ(o.until(Verdict::kPing, start), kInterval / 2);
  CHECK_EQ(o.until(Verdict::kPingAgain, start), 3 * kInterval / 2);
  CHECK_EQ(o.until(Verdict::kLost, start), 5 * kInterval / 2 + 2 * kPause);
  CHECK(o.now - start + kPause < 3 * kInterval);
  CHECK(o.now - start <= Silence::limit(kInterval));
}

CASE(a_busy_peer_gets_no_ping) {
  Observer o;
  for (int i = 0; i < 1000; ++i) {
    ++o.life;
    CHECK(o.check() == Verdict::kNone);
  }
}

CASE(any_sign_of_life_counts_from_its_arrival) {
  Observer o;
  o.check();
  o.until(Verdict::kPing, 0);
  o.until(Verdict::kPingAgain, 0);
  ++o.life;
  CHECK(o.check() == Verdict::kNone);
  const Nanos alive = o.now;
  CHECK_EQ(o.until(Verdict::kPing, alive), kInterval / 2);
  CHECK_EQ(o.until(Verdict::kPingAgain, alive), 3 * kInterval / 2);
  CHECK_EQ(o.until(Verdict::kLost, alive), 5 * kInterval / 2 + 2 * kPause);
}

/// A process that was stopped has not read what arrived meanwhile.
CASE(an_observer_that_was_late_begins_again) {
  Observer o;
  o.check();
  o.until(Verdict::kPing, 0);
  o.until(Verdict::kPingAgain, 0);
  o.now += 100 * kInterval;
  CHECK(o.check() == Verdict::kNone);
  const Nanos again = o.now;
  CHECK_EQ(o.until(Verdict::kPing, again), kInterval / 2);
}

/// A read that began before the peer was overdue may have missed its answer: another one must follow.
CASE(no_peer_is_lost_while_the_links_go_unread) {
  Observer o;
  o.check();
  o.until(Verdict::kPing, 0);
  o.until(Verdict::kPingAgain, 0);
  o.until(Verdict::kRead, 0);
  const std::uint64_t reads = o.reads;
  for (int i = 0; i < 1000; ++i) {
    o.reads = reads;  // with `check`, one more
    CHECK(o.check() == Verdict::kRead);
  }
  CHECK(o.check() == Verdict::kLost);
}

/// A connection may pass handshakes, and lose all messages.
CASE(a_handshake_is_no_sign_of_life) {
  Observer o;
  o.check();
  const Nanos start = o.now;
  CHECK_EQ(o.until(Verdict::kPing, start), kInterval / 2);
  o.silence.resume(o.life += 500);
  CHECK_EQ(o.until(Verdict::kPingAgain, start), 3 * kInterval / 2);
  o.silence.resume(o.life += 500);
  CHECK_EQ(o.until(Verdict::kLost, start), 5 * kInterval / 2 + 2 * kPause);
}

CASE(without_an_interval_no_peer_is_lost) {
  Silence silence(0);
  for (int i = 0; i < 1000; ++i) {
    CHECK(silence.check(i * kInterval, 0, static_cast<std::uint64_t>(i)) == Verdict::kNone);
  }
}

/// Peers that answer each ping within an interval are never lost, whatever the times of the checks; silent ones are
/// lost within the limit.
CASE(random_checks) {
  Random random(7);
  for (int round = 0; round < times(2000); ++round) {
    const bool answers = random.below(2) == 0;
    Silence silence(kInterval);
    Nanos now = 5000, answer = kNever, silent_since = now;
    std::uint64_t life = 0, reads = 0;
    bool lost = false;
    for (int i = 0; i < 300 && !lost; ++i) {
      now += 1 + static_cast<Nanos>(random.below(static_cast<std::uint64_t>(kPause)));
      if (now >= answer) {
        ++life;
        answer = kNever;
      }
      const Verdict verdict = silence.check(now, life, ++reads);
      if ((verdict == Verdict::kPing || verdict == Verdict::kPingAgain) && answers && answer == kNever) {
        answer = now + 1 + static_cast<Nanos>(random.below(static_cast<std::uint64_t>(kInterval - kPause)));
      }
      lost = verdict == Verdict::kLost;
    }
    CHECK_EQ(lost, !answers);
    if (lost) CHECK(now - silent_since <= Silence::limit(kInterval));
  }
}

}  // namespace
}  // namespace telegrad::test

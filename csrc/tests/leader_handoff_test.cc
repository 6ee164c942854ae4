// Handoff of leadership: a caller takes over between two polls, and a late thread cannot act in a later term.
#include "core/leader_handoff.h"

#include <atomic>
#include <thread>

#include "tests/check.h"

namespace telegrad::test {
namespace {

CASE(a_caller_takes_over_between_two_polls) {
  LeaderHandoff handoff;
  CHECK(!handoff.take_over());  // there is no leader of the pool
  const auto term = handoff.begin_term();
  CHECK(handoff.begin_poll(term));
  handoff.end_poll(term);
  CHECK(handoff.take_over());
  CHECK(!handoff.begin_poll(term));
  CHECK(!handoff.is_current(term));
}

CASE(a_leader_inside_a_poll_resigns_after_it) {
  LeaderHandoff handoff;
  const auto term = handoff.begin_term();
  CHECK(handoff.begin_poll(term));
  CHECK(!handoff.take_over());
  handoff.end_poll(term);
  CHECK(handoff.is_current(term) && handoff.is_wanted());
  CHECK(!handoff.begin_poll(term));
  handoff.end_term();
  CHECK(!handoff.is_wanted());
}

CASE(a_late_thread_cannot_act_in_a_later_term) {
  LeaderHandoff handoff;
  const auto first = handoff.begin_term();
  CHECK(handoff.take_over());
  const auto second = handoff.begin_term();
  CHECK(!handoff.begin_poll(first));
  CHECK(handoff.begin_poll(second));
  handoff.end_poll(first);  // has no effect
  CHECK(!handoff.take_over());
  CHECK(handoff.begin_poll(LeaderHandoff::kCallerTerm));  // a leading caller is never replaced
}

CASE(polls_and_takeovers_exclude_each_other) {
  LeaderHandoff handoff;
  std::atomic<bool> polling = false;
  std::atomic<LeaderHandoff::Term> term = handoff.begin_term();
  std::atomic<bool> resigned = false, ended = false;
  std::thread leader([&] {
    while (!ended) {
      const auto mine = term.load();
      if (!handoff.begin_poll(mine)) continue;
      polling = true;
      polling = false;
      handoff.end_poll(mine);
      if (handoff.is_current(mine) && handoff.is_wanted()) resigned = true;
    }
  });
  for (int i = 0; i < times(20000); ++i) {
    if (!handoff.take_over()) {  // the leader is inside a poll, and only its resignation ends the term
      while (!resigned.exchange(false)) {
      }
    }
    CHECK(!polling);
    handoff.end_term();
    term = handoff.begin_term();
  }
  ended = true;
  leader.join();
}

}  // namespace
}  // namespace telegrad::test

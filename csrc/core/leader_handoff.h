// How a caller takes leadership from a spinning thread of the pool.
//
// That thread is the leader for as long as it spins, but it reads links only within a poll, and it may be preempted
// between two polls. So it marks the begin and the end of each poll. A caller takes over leadership between two
// polls. Each term has its own number: a thread that returns late finds its own term ended, even if it is the turn of a
// later one.
#pragma once

#include <atomic>
#include <cstdint>

namespace telegrad {

class LeaderHandoff {
 public:
  using Term = std::uint64_t;
  static constexpr Term kCallerTerm = 0;  // term of a caller, which is never replaced

  // ---- under the engine's mutex

  /// Begins the term of a pool thread as leader.
  Term begin_term() {
    const Term term = ++last_;
    state_.store(term << 2 | kOpen, std::memory_order_release);
    return term;
  }

  /// Ends the term.
  void end_term() { state_.store(kClosed, std::memory_order_release); }

  /// Takes leadership for a caller. Returns false if no pool thread is the leader, or if the leader is inside a poll;
  /// it then resigns after that poll.
  bool take_over() {
    std::uint64_t s = state_.load(std::memory_order_acquire);
    while (true) {
      if ((s & kStates) == kOpen) {
        if (state_.compare_exchange_weak(s, kClosed, std::memory_order_acq_rel)) return true;
      } else if ((s & kStates) == kPolling) {
        if (state_.compare_exchange_weak(s, (s & ~kStates) | kWanted, std::memory_order_acq_rel)) return false;
      } else {
        return false;
      }
    }
  }

  bool is_current(Term term) const { return state_.load(std::memory_order_acquire) >> 2 == term; }
  bool is_wanted() const { return (state_.load(std::memory_order_acquire) & kStates) == kWanted; }

  // ---- by the thread of that term

  /// Begins a poll. Returns false if the term has ended, or a caller wants leadership.
  bool begin_poll(Term term) {
    if (term == kCallerTerm) return true;
    std::uint64_t begin_term = term << 2 | kOpen;
    return state_.compare_exchange_strong(begin_term, term << 2 | kPolling, std::memory_order_acq_rel);
  }

  /// Ends a poll.
  void end_poll(Term term) {
    if (term == kCallerTerm) return;
    std::uint64_t polling = term << 2 | kPolling;
    state_.compare_exchange_strong(polling, term << 2 | kOpen, std::memory_order_acq_rel);  // fails if wanted
  }

 private:
  static constexpr std::uint64_t kStates = 3, kClosed = 0, kOpen = 1, kPolling = 2, kWanted = 3;
  std::atomic<std::uint64_t> state_ = kClosed;
  Term last_ = 0;
};

}  // namespace telegrad

// How a caller takes the polling role from a thread of the pool that spins.
//
// That thread holds the role for as long as it spins, but links are read only within a look, and the thread may be off
// the processor between two. So it goes through a gate for each look, and whoever shuts the gate between two looks has
// the role. A pass is good for one holding of the role: a thread that comes back late finds its own gate shut, whoever
// has opened another one since.
#pragma once

#include <atomic>
#include <cstdint>

namespace telegrad {

class Gate {
 public:
  using Pass = std::uint64_t;
  static constexpr Pass kCaller = 0;  // a caller holds the role for good; its gate always lets it through

  // ---- under the engine's mutex

  /// A thread of the pool takes the role.
  Pass open() {
    const Pass pass = ++last_;
    state_.store(pass << 2 | kOpen, std::memory_order_release);
    return pass;
  }

  /// It gives the role up.
  void shut() { state_.store(kShut, std::memory_order_release); }

  /// A caller wants the role. True: it has it. False: nobody of the pool holds it, or one is amid a look and will give
  /// it up after that.
  bool take() {
    std::uint64_t s = state_.load(std::memory_order_acquire);
    while (true) {
      if ((s & kStates) == kOpen) {
        if (state_.compare_exchange_weak(s, kShut, std::memory_order_acq_rel)) return true;
      } else if ((s & kStates) == kLooking) {
        if (state_.compare_exchange_weak(s, (s & ~kStates) | kWanted, std::memory_order_acq_rel)) return false;
      } else {
        return false;
      }
    }
  }

  bool holds(Pass pass) const { return state_.load(std::memory_order_acquire) >> 2 == pass; }
  bool wanted() const { return (state_.load(std::memory_order_acquire) & kStates) == kWanted; }

  // ---- by the holder of the pass

  /// Before a look. False: the role is another's, or wanted.
  bool enter(Pass pass) {
    if (pass == kCaller) return true;
    std::uint64_t open = pass << 2 | kOpen;
    return state_.compare_exchange_strong(open, pass << 2 | kLooking, std::memory_order_acq_rel);
  }

  /// After it.
  void leave(Pass pass) {
    if (pass == kCaller) return;
    std::uint64_t looking = pass << 2 | kLooking;
    state_.compare_exchange_strong(looking, pass << 2 | kOpen, std::memory_order_acq_rel);  // else it is wanted
  }

 private:
  static constexpr std::uint64_t kStates = 3, kShut = 0, kOpen = 1, kLooking = 2, kWanted = 3;
  std::atomic<std::uint64_t> state_ = kShut;
  Pass last_ = 0;
};

}  // namespace telegrad

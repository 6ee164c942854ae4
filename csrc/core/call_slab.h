// The pending calls of a worker: a slab of slots, found by call id in constant time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "core/link_error.h"
#include "core/message.h"
#include "core/parker.h"
#include "wire/constants.h"

namespace telegrad {

using CallStatus = wire::Status;

/// How a call ended.
struct Completion {
  /// Returns the completion of a call whose peer is lost, or cannot be reached.
  static Completion lost(CallStatus status, const LinkError& why) {
    return {.status = status, .loss = why.loss(), .why = why.text};
  }
  /// Returns the completion of a call after its deadline.
  static Completion timed_out(CallState state) { return {.status = CallStatus::kTimedOut, .why = name_of(state)}; }

  CallStatus status = CallStatus::kPending;
  Loss loss = Loss::kOther;
  Incoming reply;  // if kReplied
  std::int32_t peer = -1;
  std::uint64_t connection = 0;  // if kReplied
  std::string why;               // the reason, for any other status; of kTimedOut `name_of` its CallState
};

/// A waiting thread; lives on its stack.
struct Waiter {
  Parker parker;
  bool made_leader = false;  // it has been made the leader
};

struct WaitSet;

struct Call {
  std::uint32_t generation = 1;
  CallStatus status = CallStatus::kPending;
  bool used = false;
  bool is_async = false;             // asynchronous: its completion goes to the pool
  bool counted = false;              // asynchronous, and a thread may be waiting for it
  bool deferrable = false;           // its reply may be deferred, and any caller may take it
  bool must_send = false;            // its request is sent even if the call has ended
  bool wait_for_connection = false;  // its request waits for a connection until the peer is lost
  bool background = false;           // its request is not canceled
  bool expired = false;              // its deadline has passed, and the callee has been asked how far it has come
  std::int32_t peer = -1;
  std::uint32_t name_id = 0;  // of the function; 0: none
  std::uint64_t connection = 0;
  Nanos since = 0;  // when the call was made
  Waiter* waiter = nullptr;
  WaitSet* wait_set = nullptr;  // gets the completion instead of the pool
  Completion completion;
  std::unique_ptr<KeepAlive> target;      // asynchronous: returned with the completion
  std::unique_ptr<KeepAlive> keep_alive;  // kept until the reply has arrived, even a late one, or the peer is lost
  std::multimap<Nanos, std::uint64_t>::iterator deadline;
  bool has_deadline = false;
};

/// Slots of pending calls. Not thread-safe: the engine's mutex guards it. The address of a Call is stable.
class CallSlab {
 public:
  std::uint64_t open(std::int32_t peer);
  Call* find(std::uint64_t id) {
    const std::uint64_t index = (id & 0xffffffff) - 1;
    if (index >= size_) return nullptr;
    Call& call = at(index);
    return call.used && call.generation == id >> 32 ? &call : nullptr;
  }
  /// Removes the call and invalidates its id. The caller has taken its `target` and `keep_alive`.
  void close(std::uint64_t id);

  void set_deadline(std::uint64_t id, Nanos deadline);
  void clear_deadline(Call& call);
  /// Returns the earliest deadline, or kNever.
  Nanos next_deadline() const { return deadlines_.empty() ? kNever : deadlines_.begin()->first; }
  /// Removes the deadline of one expired call and returns its id; 0 if there is none.
  std::uint64_t pop_expired(Nanos at);

  std::size_t size() const { return used_; }
  std::size_t waiting_async() const { return async_; }
  void count_async(Call& call) {
    call.counted = true;
    ++async_;
  }

  template <class F>
  void for_each(F f) NO_THREAD_SAFETY_ANALYSIS {
    for (std::uint32_t i = 0; i < size_; ++i) {
      if (Call& call = at(i); call.used) f(id_of(i), call);
    }
  }

 private:
  static constexpr std::uint64_t kSlotsPerBlock = 64;

  Call& at(std::uint64_t index) const { return blocks_[index / kSlotsPerBlock][index % kSlotsPerBlock]; }
  std::uint64_t id_of(std::uint32_t index) const { return (std::uint64_t{at(index).generation} << 32) | (index + 1); }

  std::vector<std::unique_ptr<Call[]>> blocks_;
  std::uint32_t size_ = 0;  // slots used so far
  std::vector<std::uint32_t> free_;
  std::multimap<Nanos, std::uint64_t> deadlines_;
  std::size_t used_ = 0;
  std::size_t async_ = 0;
};

}  // namespace telegrad

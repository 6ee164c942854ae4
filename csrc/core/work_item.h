// Work items of the pool's threads, and wait sets, which receive completions instead of the pool.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/call_slab.h"
#include "core/connection.h"
#include "core/message.h"
#include "wire/constants.h"

namespace telegrad {

using wire::EventKind;
using wire::WorkKind;

/// Work for a thread of the pool. The kinds share fields, which makes moves into a queue and out of it cheap.
struct WorkItem {
  /// Moves the completion out of an item of kCompletion.
  Completion take_completion() {
    return {.status = status,
            .loss = loss,
            .reply = std::move(message),
            .peer = peer,
            .connection = connection,
            .why = std::move(text)};
  }

  WorkKind kind{};
  EventKind event{};
  // kCompletion: how the call ended. kRequest: kCanceled or kTimedOut if it does not run, else kPending.
  CallStatus status = CallStatus::kPending;
  Loss loss = Loss::kOther;   // kCompletion
  bool needs_thread = false;  // this was the last free thread: start another one
  std::int32_t peer = -1;
  std::uint64_t connection = 0;
  Nanos deadline = kNever;  // requests
  Nanos since = 0;          // when it was queued
  Incoming message;         // a request, a one-way message, or the reply of a completion; it has the id of the call
  std::shared_ptr<const Name> name;
  std::unique_ptr<KeepAlive> target;  // kCompletion
  std::uint64_t incarnation = 0;      // kEvent
  std::string text;                   // of an event; the reason of a completion without a reply
};

/// Wait set: many calls for which one thread waits, and takes each completion as it arrives. Guarded by the engine's
/// mutex.
struct WaitSet {
  Waiter waiter;
  std::vector<std::uint64_t> calls;            // in ascending order
  std::vector<std::uint64_t> taken_elsewhere;  // calls that have ended, or with a completion that another thread took
  std::size_t expected = 0;                    // calls without a completion so far
  bool exhausted = false;                      // no completion was outstanding when `wait` returned
  std::uint64_t connection = 0;                // connection of one of these calls
  std::deque<WorkItem> completions;            // completions that have arrived
  bool notified = false;                       // another thread has processed a completion
};

}  // namespace telegrad

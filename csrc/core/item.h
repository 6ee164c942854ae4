// Work items of the pool's threads, and wait sets, which receive completions instead of the pool.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/calls.h"
#include "core/message.h"

namespace telegrad {

enum class ItemKind : std::uint8_t { kRequest, kOneway, kOutcome, kEvent, kRetire };
enum class EventKind : std::uint8_t { kPeerLost, kPeerLeft, kLog, kNudge, kPeerBack, kConnected };

/// Work for a thread of the pool.
struct Item {
  ItemKind kind{};
  EventKind event{};
  bool spawn = false;  // this was the last free thread: start another one
  std::int32_t peer = -1;
  std::uint64_t connection = 0;
  Nanos deadline = kNever;  // requests
  Nanos since = 0;          // when it was queued
  Incoming message;
  std::shared_ptr<const Name> name;
  Outcome outcome;                // kOutcome
  std::unique_ptr<Keep> cookie;   // kOutcome
  std::uint64_t incarnation = 0;  // kEvent
  std::string text;               // kEvent
};

/// Wait set: many calls for which one thread waits, and takes each completion as it arrives. Guarded by the engine's
/// mutex.
struct Collector {
  Waiter waiter;
  std::vector<std::uint64_t> calls;      // in ascending order
  std::vector<std::uint64_t> elsewhere;  // calls that have ended, or with a completion that another thread took
  std::size_t expected = 0;              // calls without a completion so far
  bool over = false;                     // no completion was outstanding when `wait` returned
  std::uint64_t connection = 0;          // connection of one of these calls
  std::deque<Item> outcomes;             // completions that have arrived
  bool told = false;                     // another thread has processed a completion
};

}  // namespace telegrad

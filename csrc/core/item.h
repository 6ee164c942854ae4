// What a thread of the pool is given to do, and who may have outcomes of calls instead of the pool.
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

/// Something for a pool thread to do.
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

/// One thread that waits for many calls, and takes what becomes of them as it comes. Guarded by the engine's mutex.
struct Collector {
  Waiter waiter;
  std::vector<std::uint64_t> calls;      // in ascending order
  std::vector<std::uint64_t> elsewhere;  // of them, those that are over, or in somebody else's hands
  std::size_t expected = 0;              // and those whose outcomes are to come:
  bool over = false;                     // none, when `wait` returned
  std::uint64_t connection = 0;          // over which one of these will
  std::deque<Item> outcomes;             // that have come
  bool told = false;                     // that somebody else is done with one
};

}  // namespace telegrad

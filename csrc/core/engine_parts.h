// The parts of an engine. They use each other, and share one mutex.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "base/thread_safety.h"
#include "core/call_table.h"
#include "core/canceler.h"
#include "core/detector.h"
#include "core/leader.h"
#include "core/overload.h"
#include "core/peers.h"
#include "core/sender.h"
#include "core/settings.h"
#include "core/timer.h"
#include "core/work_queue.h"
#include "memory/buffer_pool.h"
#include "memory/memory_budget.h"
#include "memory/multicast_arena.h"

namespace telegrad {

struct EngineParts {
  explicit EngineParts(Settings s)
      : settings(std::move(s)),
        budget(std::make_shared<MemoryBudget>(settings.load.arena_budget)),
        buffers(BufferPool::make(settings.pool_cache, budget)),
        multicast_arena(std::make_shared<MulticastArena>(settings.handshake.limits.leased, budget)) {}

  bool is_stopping() const { return stopping.load(std::memory_order_acquire); }

  const Settings settings;
  const std::shared_ptr<MemoryBudget> budget;  // of the arenas and the cache of `buffers`
  const std::shared_ptr<BufferPool> buffers;
  const std::shared_ptr<MulticastArena> multicast_arena;
  mutable std::mutex mutex;

  // How far the engine has stopped.
  std::atomic<bool> stopping = false;             // no call is made any more
  bool stopped GUARDED_BY(engine_mutex) = false;  // all calls have ended
  bool forked GUARDED_BY(engine_mutex) = false;   // this process is a fork of the engine's

  Timer timer;
  WorkQueue queue{*this, settings.handlers};
  CallTable calls{*this};
  Canceler canceler{*this};
  Overload overload{*this, settings.load, settings.handshake.limits};
  Sender sender{*this, settings.window};
  Peers peers{*this};
  Leader leader{*this};
  Detector detector{*this};
};

}  // namespace telegrad

// Forks of a process that has engines.
//
// A forked child has none of the engines' threads. It must not hold their links open, or a peer would not see the
// parent die; and it must not say a word on them. The hooks are the C library's, which run while no other code of this
// thread does: with hooks of the layer above, another thread could take its lock (the GIL) in between and wait for an
// engine.
#pragma once

#include <mutex>

namespace telegrad {

class Engine;

/// From now on forks respect this engine; `forget_at_forks` ends it.
void remember_at_forks(Engine* engine);
void forget_at_forks(Engine* engine);

/// Told of forks, after the engines and before the locks below. Its own lock may be taken while an engine's is held.
class ForkWatcher {
 public:
  virtual ~ForkWatcher() = default;
  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  virtual void after_fork_in_child() = 0;
};
void watch_forks(ForkWatcher* watcher);
void unwatch_forks(ForkWatcher* watcher);

/// Forks wait for this lock, so that a child never finds it taken by a thread that it does not have. It may be taken
/// while an engine's is held, but not the other way round. Returns true; for static initializers.
bool hold_at_forks(std::mutex& mutex);

}  // namespace telegrad

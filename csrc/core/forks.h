// Forks of a process that has engines.
//
// A forked child has none of the engines' threads. It must not keep their connections open, or a peer would not see the
// parent die, and it must not send anything on them. The hooks are those of the C library, because no other code of the
// forking thread runs between them and fork(). Between Python's hooks and fork(), another thread could take the GIL and
// wait for an engine.
#pragma once

#include <mutex>

namespace telegrad {

class Engine;

/// Registers an engine for the hooks of fork(); `forget_at_forks` ends this. Any thread.
void remember_at_forks(Engine* engine);
void forget_at_forks(Engine* engine);

/// Interface of objects with hooks of their own, called after those of the engines and before the locks below are
/// taken. Its lock may be taken while an engine's is held.
class ForkWatcher {
 public:
  virtual ~ForkWatcher() = default;
  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  virtual void after_fork_in_child() = 0;
};
void watch_forks(ForkWatcher* watcher);
void unwatch_forks(ForkWatcher* watcher);

/// Makes forks take this lock, so that it is free in the child. It may be taken while an engine's lock is held, but not
/// the other way round. Returns true; for static initializers.
bool hold_at_forks(std::mutex& mutex);

}  // namespace telegrad

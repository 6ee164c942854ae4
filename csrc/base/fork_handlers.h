// Handlers of fork() for objects with locks, threads or descriptors.
//
// A forked child has none of the threads of its parent. It must not keep connections of the parent open, or a peer
// would not see the parent die, and it must not send anything on them. The handlers are those of the C library
// (pthread_atfork), because no other code of the forking thread runs between them and fork(). Between Python's handlers
// and fork(), another thread could take the GIL and wait for an engine.
#pragma once

#include <mutex>

namespace telegrad {

class ForkHandler {
 public:
  virtual ~ForkHandler() = default;
  /// Takes the locks of the object, so that they are free in the child.
  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  virtual void after_fork_in_child() = 0;
};

/// Order in which the handlers take their locks. A lock of a later level may be taken while one of an earlier level is
/// held.
enum class ForkLevel { kEngine, kArena };

/// Registers a handler. Do not call it while a lock of the same or of a later level is held. A child has no handlers of
/// engines.
void register_fork_handler(ForkHandler* handler, ForkLevel level);
void unregister_fork_handler(ForkHandler* handler, ForkLevel level);

/// Makes forks take this lock after those of all handlers. Returns true; for static initializers.
bool lock_at_fork(std::mutex& mutex);

}  // namespace telegrad

// Annotations of clang's thread-safety analysis; empty for other compilers. `make lint` checks them.
#pragma once

#include <mutex>

#ifdef __clang__
#define TELEGRAD_ANNOTATE(x) __attribute__((x))
#else
#define TELEGRAD_ANNOTATE(x)
#endif

#define CAPABILITY(x) TELEGRAD_ANNOTATE(capability(x))
#define SCOPED_CAPABILITY TELEGRAD_ANNOTATE(scoped_lockable)
#define GUARDED_BY(x) TELEGRAD_ANNOTATE(guarded_by(x))
#define REQUIRES(...) TELEGRAD_ANNOTATE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TELEGRAD_ANNOTATE(locks_excluded(__VA_ARGS__))
#define TRY_ACQUIRE(...) TELEGRAD_ANNOTATE(try_acquire_capability(__VA_ARGS__))
#define ACQUIRE(...) TELEGRAD_ANNOTATE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TELEGRAD_ANNOTATE(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS TELEGRAD_ANNOTATE(no_thread_safety_analysis)

namespace telegrad {

/// A mutex that the analysis knows.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

/// Holds such a mutex for its scope.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  /// The caller has locked it.
  MutexLock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// Stands for the mutex of an engine in annotations. The parts of an engine share its mutex, and the analysis cannot
/// know that `a.parts_.mutex` and `b.parts_.mutex` are the same. No code holds the mutex of one engine while it uses
/// another one.
class CAPABILITY("mutex") EngineMutexRole {};
inline EngineMutexRole engine_mutex;

/// Holds the mutex of an engine for its scope.
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(std::mutex& mutex) ACQUIRE(engine_mutex) : lock_(mutex) {}
  ~Lock() RELEASE() {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() ACQUIRE() { lock_.lock(); }
  void unlock() RELEASE() { lock_.unlock(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Releases the mutex of an engine for its scope.
class SCOPED_CAPABILITY Unlock {
 public:
  explicit Unlock(Lock& lock) RELEASE(engine_mutex) NO_THREAD_SAFETY_ANALYSIS : lock_(lock) { lock_.unlock(); }
  ~Unlock() RELEASE() NO_THREAD_SAFETY_ANALYSIS { lock_.lock(); }  // RELEASE: ends the scope, which acquires the mutex
  Unlock(const Unlock&) = delete;
  Unlock& operator=(const Unlock&) = delete;

 private:
  Lock& lock_;
};

}  // namespace telegrad

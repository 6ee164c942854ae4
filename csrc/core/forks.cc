#include "core/forks.h"

#include <pthread.h>

#include <mutex>
#include <vector>

#include "core/engine.h"

namespace telegrad {
namespace {

struct Registry {
  std::mutex mutex;  // held during a fork
  std::vector<Engine*> engines;
  std::vector<std::mutex*> others;
  // A separate lock, because watchers are added and removed while an engine's lock may be held.
  std::mutex watchers_mutex;
  std::vector<ForkWatcher*> watchers;
};

Registry& registry() {
  static auto* r = new Registry;  // never destroyed: engines may outlive static objects
  return *r;
}

void before() {
  registry().mutex.lock();
  for (Engine* e : registry().engines) e->before_fork();
  registry().watchers_mutex.lock();
  for (ForkWatcher* w : registry().watchers) w->before_fork();
  for (std::mutex* m : registry().others) m->lock();
}

void release_others() {
  for (std::mutex* m : registry().others) m->unlock();
}

void after_in_parent() {
  release_others();
  for (ForkWatcher* w : registry().watchers) w->after_fork_in_parent();
  registry().watchers_mutex.unlock();
  for (Engine* e : registry().engines) e->after_fork_in_parent();
  registry().mutex.unlock();
}

void after_in_child() {
  release_others();
  for (ForkWatcher* w : registry().watchers) w->after_fork_in_child();
  registry().watchers_mutex.unlock();
  for (Engine* e : registry().engines) e->after_fork_in_child();
  registry().engines.clear();
  registry().mutex.unlock();
}

void hook() {
  static const int hooked = pthread_atfork(before, after_in_parent, after_in_child);
  static_cast<void>(hooked);
}

}  // namespace

void remember_at_forks(Engine* engine) {
  hook();
  std::lock_guard lock(registry().mutex);
  registry().engines.push_back(engine);
}

bool hold_at_forks(std::mutex& mutex) {
  std::lock_guard lock(registry().mutex);
  registry().others.push_back(&mutex);
  return true;
}

void watch_forks(ForkWatcher* watcher) {
  hook();
  std::lock_guard lock(registry().watchers_mutex);
  registry().watchers.push_back(watcher);
}

void unwatch_forks(ForkWatcher* watcher) {
  std::lock_guard lock(registry().watchers_mutex);
  std::erase(registry().watchers, watcher);
}

void forget_at_forks(Engine* engine) {
  std::lock_guard lock(registry().mutex);
  std::erase(registry().engines, engine);
}

}  // namespace telegrad

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
};

Registry& registry() {
  static auto* r = new Registry;  // never destroyed: engines may outlive static objects
  return *r;
}

void before() {
  registry().mutex.lock();
  for (Engine* e : registry().engines) e->before_fork();
  for (std::mutex* m : registry().others) m->lock();
}

void release_others() {
  for (std::mutex* m : registry().others) m->unlock();
}

void after_in_parent() {
  release_others();
  for (Engine* e : registry().engines) e->after_fork_in_parent();
  registry().mutex.unlock();
}

void after_in_child() {
  release_others();
  for (Engine* e : registry().engines) e->after_fork_in_child();
  registry().engines.clear();
  registry().mutex.unlock();
}

}  // namespace

void remember_at_forks(Engine* engine) {
  static const int hooked = pthread_atfork(before, after_in_parent, after_in_child);
  static_cast<void>(hooked);
  std::lock_guard lock(registry().mutex);
  registry().engines.push_back(engine);
}

bool hold_at_forks(std::mutex& mutex) {
  std::lock_guard lock(registry().mutex);
  registry().others.push_back(&mutex);
  return true;
}

void forget_at_forks(Engine* engine) {
  std::lock_guard lock(registry().mutex);
  std::erase(registry().engines, engine);
}

}  // namespace telegrad

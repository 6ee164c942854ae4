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
};

Registry& registry() {
  static auto* r = new Registry;  // never destroyed: engines may outlive static objects
  return *r;
}

void before() {
  registry().mutex.lock();
  for (Engine* e : registry().engines) e->before_fork();
}

void after_in_parent() {
  for (Engine* e : registry().engines) e->after_fork_in_parent();
  registry().mutex.unlock();
}

void after_in_child() {
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

void forget_at_forks(Engine* engine) {
  std::lock_guard lock(registry().mutex);
  std::erase(registry().engines, engine);
}

}  // namespace telegrad

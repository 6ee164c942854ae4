#include "base/fork_handlers.h"

#include <pthread.h>

#include <iterator>
#include <vector>

namespace telegrad {
namespace {

struct Level {
  std::mutex mutex;  // held during a fork
  std::vector<ForkHandler*> handlers;
};

struct Registry {
  Level levels[2];
  std::vector<std::mutex*> leaves;  // guarded by the mutex of the first level

  Level& at(ForkLevel level) { return levels[static_cast<int>(level)]; }
};

void before();
void after_in_parent();
void after_in_child();

Registry& registry() {
  static Registry* const r = [] {
    pthread_atfork(before, after_in_parent, after_in_child);
    return new Registry;  // never destroyed: engines may outlive static objects
  }();
  return *r;
}

void before() {
  for (Level& level : registry().levels) {
    level.mutex.lock();
    for (ForkHandler* h : level.handlers) h->before_fork();
  }
  for (std::mutex* m : registry().leaves) m->lock();
}

void after(void (ForkHandler::*run)()) {
  for (std::mutex* m : registry().leaves) m->unlock();
  for (int i = static_cast<int>(std::size(registry().levels)); i-- > 0;) {
    Level& level = registry().levels[i];
    for (ForkHandler* h : level.handlers) (h->*run)();
    if (run == &ForkHandler::after_fork_in_child && i == 0) level.handlers.clear();
    level.mutex.unlock();
  }
}

void after_in_parent() { after(&ForkHandler::after_fork_in_parent); }

void after_in_child() { after(&ForkHandler::after_fork_in_child); }

}  // namespace

void register_fork_handler(ForkHandler* handler, ForkLevel level) {
  std::lock_guard lock(registry().at(level).mutex);
  registry().at(level).handlers.push_back(handler);
}

void unregister_fork_handler(ForkHandler* handler, ForkLevel level) {
  std::lock_guard lock(registry().at(level).mutex);
  std::erase(registry().at(level).handlers, handler);
}

bool lock_at_fork(std::mutex& mutex) {
  std::lock_guard lock(registry().levels[0].mutex);
  registry().leaves.push_back(&mutex);
  return true;
}

}  // namespace telegrad

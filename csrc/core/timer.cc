#include "core/timer.h"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace telegrad {

Timer::Timer() : fd_(make_timerfd(0)) {}

void Timer::start(std::mutex& mutex, std::function<void(Lock&)> on_timer) {
  on_timer_ = std::move(on_timer);
  thread_ = std::thread([this, &mutex] { loop(mutex); });
  pthread_setname_np(thread_.native_handle(), "telegrad-time");
}

void Timer::stop(std::mutex& mutex) {
  {
    Lock lock(mutex);
    stopped_ = true;
    clear();
    arm(1);
  }
  if (thread_.joinable()) thread_.join();  // a forked child has none
}

void Timer::run(std::mutex& mutex) {
  Lock lock(mutex);
  on_timer_(lock);
}

void Timer::loop(std::mutex& mutex) {
  while (true) {
    std::uint64_t expirations;
    if (::read(fd_.get(), &expirations, sizeof expirations) < 0 && errno != EINTR) return;
    Lock lock(mutex);
    if (stopped_) return;
    on_timer_(lock);
  }
}

void Timer::abandon_in_child() {
  ::close(fd_.release());
  stopped_ = true;
  new std::thread(std::move(thread_));  // never destroyed: it is a thread of the parent
}

}  // namespace telegrad

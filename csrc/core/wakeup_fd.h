// Descriptors that wake a thread asleep in epoll.
#pragma once

#include <sys/timerfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/clock.h"

namespace telegrad {

/// Makes an eventfd readable until it is drained. Never blocks.
inline void notify_fd(int eventfd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(eventfd, &one, sizeof one);
}

/// Makes a timerfd readable from `at` (monotonic) until it is drained. Never blocks.
inline void arm_timerfd(int timerfd, Nanos at) {
  const itimerspec spec{.it_interval = {}, .it_value = {.tv_sec = at / kSecond, .tv_nsec = at % kSecond}};
  timerfd_settime(timerfd, TFD_TIMER_ABSTIME, &spec, nullptr);
}

inline void drain_fd(int fd) {
  std::uint64_t count;
  [[maybe_unused]] auto n = ::read(fd, &count, sizeof count);
}

}  // namespace telegrad

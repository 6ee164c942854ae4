// Descriptors that wake a thread asleep in epoll.
#pragma once

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "base/clock.h"
#include "base/unique_fd.h"

namespace telegrad {

/// Makes the owner of a new descriptor. Throws std::system_error if it is -1.
inline UniqueFd check_fd(int fd, const char* error) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), error);
  return UniqueFd(fd);
}

inline UniqueFd make_eventfd() { return check_fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "cannot create an eventfd"); }
inline UniqueFd make_timerfd(int flags) {
  return check_fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | flags), "cannot create a timerfd");
}

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

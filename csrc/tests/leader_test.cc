// Waits of callers: what ends one, and which thread is the leader afterwards.
#include "core/leader.h"

#include <sys/eventfd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/engine_parts.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

const auto kNothing = [] { return false; };

CASE(a_wait_for_what_is_done_does_not_lead) {
  EngineParts parts{Settings{}};
  Waiter w;
  CHECK(parts.leader.wait_for_progress(w, [] { return true; }, 0, {}) == WaitEnd::kDone);
  CHECK_EQ(parts.leader.reads(), 0u);
  CHECK(!parts.leader.exists());
}

CASE(a_wait_ends_at_its_deadline_and_resigns) {
  EngineParts parts{Settings{}};
  Waiter w;
  const Nanos until = now() + 5 * kMillisecond;
  CHECK(parts.leader.wait_for_progress(w, kNothing, until, {}) == WaitEnd::kDeadline);
  CHECK(now() >= until);
  CHECK(!parts.leader.exists());
}

/// More descriptors are always readable than one poll returns.
CASE(all_links_are_read_in_turn) {
  EngineParts parts{Settings{}};
  std::vector<UniqueFd> readable;
  for (std::uint64_t i = 0; i < 100; ++i) {
    readable.emplace_back(::eventfd(1, EFD_CLOEXEC));
    parts.leader.add_fd(readable.back().get(), 1000 + i);  // no connection has this token
  }
  Waiter w;
  const auto done = [&] { return parts.leader.reads() >= 3; };
  CHECK(parts.leader.wait_for_progress(w, done, now() + 5 * kSecond, {}) == WaitEnd::kDone);
  for (const UniqueFd& fd : readable) parts.leader.remove_fd(fd.get());
}

CASE(a_stopped_engine_ends_a_wait) {
  EngineParts parts{Settings{}};
  {
    Lock lock(parts.mutex);
    parts.stopped = true;
  }
  Waiter w;
  CHECK(parts.leader.wait_for_progress(w, kNothing, kNever, {}) == WaitEnd::kStopped);
}

CASE(an_interrupted_leader_resigns_before_it_asks_without_the_mutex) {
  EngineParts parts{Settings{}};
  Waiter w;
  bool led = true, locked = true;
  const auto interrupted = [&] {
    led = parts.leader.exists();
    locked = !parts.mutex.try_lock();
    if (!locked) parts.mutex.unlock();
    return true;
  };
  CHECK(parts.leader.wait_for_progress(w, kNothing, kNever, interrupted) == WaitEnd::kInterrupted);
  CHECK(!led);
  CHECK(!locked);
}

CASE(a_sleeping_caller_leads_after_the_leader) {
  EngineParts parts{Settings{}};
  std::atomic<bool> first_done = false, second_done = false;
  std::thread first([&] {
    Waiter w;
    CHECK(parts.leader.wait_for_progress(w, [&] { return first_done.load(); }, kNever, {}) == WaitEnd::kDone);
  });
  while (!parts.leader.exists()) std::this_thread::yield();
  std::thread second([&] {
    Waiter w;
    CHECK(parts.leader.wait_for_progress(w, [&] { return second_done.load(); }, kNever, {}) == WaitEnd::kDone);
  });
  const auto is_asleep = [&] {
    Lock lock(parts.mutex);
    return parts.leader.has_sleeping_callers();
  };
  while (!is_asleep()) std::this_thread::yield();
  const auto finish = [&](std::atomic<bool>& done, std::thread& thread) {
    done = true;
    {
      Lock lock(parts.mutex);
      parts.leader.notify_progress();
    }
    thread.join();
  };
  finish(first_done, first);
  CHECK(parts.leader.exists());  // without a moment between
  finish(second_done, second);
  CHECK(!parts.leader.exists());
}

}  // namespace
}  // namespace telegrad::test

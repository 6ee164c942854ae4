// The timer: the earliest time counts, and the thread ends when asked.
#include "core/timer.h"

#include "tests/check.h"

namespace telegrad::test {
namespace {

struct Timed {
  Timed() {
    timer.start(mutex, [this](Lock&) {
      ++runs;
      timer.clear();
      ran.set();
    });
  }
  ~Timed() { timer.stop(mutex); }

  std::mutex mutex;
  Event ran;
  int runs = 0;
  Timer timer;
};

CASE(nothing_is_due_at_first) {
  Timed t;
  CHECK(!t.timer.is_due(now()));
}

CASE(the_thread_runs_what_is_due) {
  Timed t;
  {
    Lock lock(t.mutex);
    t.timer.arm(now());
  }
  t.ran.wait();
}

CASE(the_earliest_time_counts) {
  Timed t;
  const Nanos at = now() + 3600 * kSecond;
  Lock lock(t.mutex);
  t.timer.arm(at);
  t.timer.arm(at + kSecond);
  CHECK(!t.timer.is_due(at - 1));
  CHECK(t.timer.is_due(at));
  t.timer.arm(at - kSecond);
  CHECK(t.timer.is_due(at - kSecond));
  t.timer.clear();
  CHECK(!t.timer.is_due(at));
}

CASE(any_thread_may_run_the_timer) {
  Timed t;
  t.timer.run(t.mutex);
  CHECK_EQ(t.runs, 1);
}

}  // namespace
}  // namespace telegrad::test

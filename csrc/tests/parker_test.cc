// Parker and spinning: no notification is lost, and waits end in time.
#include "core/parker.h"

#include <thread>

#include "core/spin.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

CASE(a_notification_before_the_wait_is_not_lost) {
  Parker parker;
  parker.notify();
  parker.notify();
  CHECK(parker.is_notified());
  parker.wait(kNever);
  CHECK(parker.is_notified());
  parker.reset();
  CHECK(!parker.is_notified());
}

CASE(a_wait_ends_in_time) {
  Parker parker;
  for (const Nanos span : {Nanos{0}, 1 * kMicrosecond, 3 * kMillisecond}) {
    const Nanos start = now();
    parker.wait(start + span);
    CHECK(now() - start >= span);
    CHECK(!parker.is_notified());
  }
  parker.wait(1);  // long ago
  parker.wait(now() - kSecond);
  CHECK(!parker.is_notified());
}

CASE(two_threads_notify_each_other_in_turn) {
  Parker here, there;
  const int count = times(50000);
  std::thread other([&] {
    for (int i = 0; i < count; ++i) {
      while (!there.is_notified()) there.wait(kNever);
      there.reset();
      here.notify();
    }
  });
  for (int i = 0; i < count; ++i) {
    there.notify();
    while (!here.is_notified()) here.wait(i % 3 ? kNever : now() + kMicrosecond);
    here.reset();
  }
  other.join();
}

CASE(many_threads_notify_one) {
  Parker parker;
  std::atomic<int> rings = 0;
  const int count = times(20000);
  std::thread threads[3];
  for (auto& t : threads) {
    t = std::thread([&] {
      for (int i = 0; i < count; ++i) {
        rings.fetch_add(1);
        parker.notify();
      }
    });
  }
  while (rings.load() < 3 * count) {
    parker.reset();
    if (rings.load() < 3 * count) parker.wait(kNever);  // the last notification follows its count
  }
  for (auto& t : threads) t.join();
}

CASE(spinning_stops_when_it_does_not_pay_and_starts_again) {
  Spin spin(50 * kMicrosecond);
  CHECK_EQ(spin.budget(), 50 * kMicrosecond);
  for (int i = 0; i < 10; ++i) spin.slept(2 * kMillisecond);
  CHECK_EQ(spin.budget(), 0);
  spin.slept(20 * kMicrosecond);  // spinning would have caught it
  CHECK_EQ(spin.budget(), 50 * kMicrosecond);
  spin.slept(2 * kMillisecond);
  spin.slept(2 * kMillisecond);
  spin.hit(0);
  spin.slept(2 * kMillisecond);
  CHECK_EQ(spin.budget(), 50 * kMicrosecond);
  Spin never(0);
  never.hit(0);
  CHECK_EQ(never.budget(), 0);
  never.slept(kMicrosecond);
  CHECK_EQ(never.budget(), 0);
}

CASE(spinning_lasts_as_long_as_events_have_lately_taken) {
  Spin spin(50 * kMicrosecond);
  spin.slept(400 * kMicrosecond);
  CHECK_EQ(spin.budget(), 600 * kMicrosecond);
  spin.hit(400 * kMicrosecond);
  CHECK_EQ(spin.budget(), 800 * kMicrosecond);
  spin.hit(10 * kMicrosecond);  // an early event among late ones
  CHECK_EQ(spin.budget(), 700 * kMicrosecond);
  for (int i = 0; i < 30; ++i) spin.hit(10 * kMicrosecond);
  CHECK_EQ(spin.budget(), 50 * kMicrosecond);
  spin.hit(900 * kMicrosecond);
  CHECK_EQ(spin.budget(), kMillisecond);  // the upper bound
  spin.slept(2 * kMillisecond);
  CHECK_EQ(spin.budget(), 50 * kMicrosecond);
}
CASE(deadlines_do_not_overflow) {
  CHECK_EQ(deadline_after(100, 0), kNever);
  CHECK_EQ(deadline_after(100, 5), 105);
  CHECK_EQ(deadline_after(100, kNever), kNever);
  CHECK_EQ(deadline_after(kNever - 5, 6), kNever);
  CHECK_EQ(deadline_after(100, -1), kNever);
}

}  // namespace
}  // namespace telegrad::test

// Wait sets: one thread waits for many calls and gets their completions directly.
#include <algorithm>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// A wait set of a worker, used as the bindings do. At its end, the pool gets the remaining completions.
class WaitSetScope {
 public:
  WaitSetScope(Worker& worker, std::vector<std::uint64_t> calls) : engine_(*worker.engine) {
    std::sort(calls.begin(), calls.end());
    wait_set.calls = std::move(calls);
    began = engine_.add_wait_set(wait_set);
  }
  ~WaitSetScope() { end(); }

  /// Returns the next completions; nothing if none is left.
  std::deque<WorkItem> next() {
    std::deque<WorkItem> items;
    const WaitEnd end = engine_.wait(wait_set, {}, items);
    CHECK(end == WaitEnd::kDone || end == WaitEnd::kStopped);
    return items;
  }
  /// Returns all completions, by call.
  std::map<std::uint64_t, Completion> all() {
    std::map<std::uint64_t, Completion> found;
    while (true) {
      std::deque<WorkItem> items = next();
      if (items.empty()) return found;
      for (WorkItem& item : items) {
        CHECK(item.kind == WorkKind::kCompletion && item.target);
        CHECK(found.emplace(item.message.header.call_id, item.take_completion()).second);
      }
    }
  }
  /// Completions that the pool could not take, because it has no threads.
  std::deque<WorkItem> end(std::deque<WorkItem> left = {}) {
    if (!std::exchange(ended_, true)) engine_.remove_wait_set(wait_set, left);
    return left;
  }

  telegrad::WaitSet wait_set;
  bool began;

 private:
  Engine& engine_;
  bool ended_ = false;
};

CASE_ON_EVERY_SCHEME(every_completion_goes_to_the_wait_set_or_to_the_pool) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const int count = 50;
  int collected = 0;
  for (int round = 0; round < times(40); ++round) {
    std::vector<std::uint64_t> calls;
    for (int i = 0; i < count; ++i) calls.push_back(a.start(1, round * count + i, {.body = std::to_string(i)}));
    WaitSetScope set(a, calls);
    CHECK(set.began);
    for (auto& [call, completion] : set.all()) {
      const auto at = std::find(calls.begin(), calls.end(), call) - calls.begin();
      CHECK_EQ(body_of(completion), std::to_string(at));
      ++collected;
    }
    set.end();
    a.completion_count.wait_for((round + 1) * count - collected);
  }
  CHECK(collected > 0);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE_ON_EVERY_SCHEME(completions_queued_for_the_pool_go_to_the_wait_set) {
  Worker a(0, {}, 0), b(1);  // `a` has no pool threads
  introduce({&a, &b}, scheme);
  std::vector<std::uint64_t> calls;
  for (int i = 0; i < 10; ++i) calls.push_back(a.start(1, i, {.body = std::to_string(i)}));
  CHECK_EQ(body_of(a.call(1, {.body = "behind them"})), "behind them");
  const std::uint64_t other = a.start(1, 10, {.body = "not asked for"});
  CHECK_EQ(body_of(a.call(1, {})), "");
  {
    WaitSetScope set(a, calls);
    CHECK(set.began);
    CHECK_EQ(set.wait_set.completions.size() + set.wait_set.expected, 10u);
    CHECK_EQ(set.all().size(), 10u);
  }
  Completion o;
  CHECK(a.engine->wait(other, kNever, {}, o) == WaitEnd::kDone);  // it is still queued
  CHECK_EQ(body_of(o), "not asked for");
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE(a_waiter_in_order_takes_completions_before_the_pool) {
  Worker a(0, {}, 0), b(1);
  introduce({&a, &b}, "shm");
  std::vector<std::uint64_t> calls;
  for (int i = 0; i < 10; ++i) calls.push_back(a.start(1, i, {.body = std::to_string(i)}));
  CHECK_EQ(body_of(a.call(1, {.body = "behind them"})), "behind them");
  for (int i = 0; i < 10; ++i) {
    Completion o;
    CHECK(a.engine->wait(calls[static_cast<std::size_t>(i)], kNever, {}, o) == WaitEnd::kDone);
    CHECK_EQ(body_of(o), std::to_string(i));
  }
}

CASE(calls_with_a_waiting_thread_cannot_join_a_wait_set) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const std::uint64_t mine = a.start(1, 0, {.tag = kHold, .body = "mine"});
  const std::uint64_t waited_for = a.start(1, 1, {.tag = kHold, .body = "waited for"});
  Event waiting;
  std::thread other([&] {
    Completion o;
    while (a.engine->wait(waited_for, now() + kMillisecond, {}, o) != WaitEnd::kDone) waiting.set();
    CHECK_EQ(body_of(o), "waited for");
  });
  waiting.wait();
  bool refused = false;  // true once the other thread is inside `wait`
  while (!refused) refused = !WaitSetScope(a, {mine, waited_for}).began;
  {
    WaitSetScope first(a, {mine});
    CHECK(first.began);
    WaitSetScope second(a, {mine});
    CHECK(!second.began);
    Completion o;
    CHECK(a.engine->wait(mine, kNever, {}, o) == WaitEnd::kStopped);
    b.release.set();
    auto found = first.all();
    CHECK_EQ(body_of(found.at(mine)), "mine");
  }
  other.join();
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE_ON_EVERY_SCHEME(a_dissolved_wait_set_leaves_the_rest_to_the_pool) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const std::uint64_t soon = a.start(1, 0, {.tag = kHold, .body = "soon"});
  std::vector<std::uint64_t> calls = {soon};
  for (int i = 1; i < 10; ++i) calls.push_back(a.start(1, i, {.tag = kNoAnswer, .timeout = kSecond / 10}));
  {
    WaitSetScope set(a, calls);
    CHECK(set.began);
    b.release.set();
    std::deque<WorkItem> came = set.next();
    CHECK(!came.empty());
    set.end(std::move(came));  // not processed
  }
  a.completion_count.wait_for(10);
  std::lock_guard lock(a.mutex);
  CHECK_EQ(body_of(a.completions.at(0)), "soon");
  for (int i = 1; i < 10; ++i) CHECK(a.completions.at(i).status == CallStatus::kTimedOut);
}

CASE(a_wait_set_gets_timeouts_losses_and_the_stop) {
  Worker a(0), b(1), c(2);
  introduce({&a, &b, &c}, "unix");
  const std::uint64_t late = a.start(1, 0, {.tag = kNoAnswer, .timeout = kMillisecond});
  const std::uint64_t lost = a.start(2, 1, {.tag = kNoAnswer});
  const std::uint64_t stopped = a.start(1, 2, {.tag = kNoAnswer});
  c.handled.wait_for(1);
  Event collecting_began;
  std::map<std::uint64_t, Completion> found;
  std::thread collects([&] {
    WaitSetScope set(a, {late, lost, stopped});
    collecting_began.set();
    found = set.all();
  });
  collecting_began.wait();
  a.start(1, 3, {.tag = kNoAnswer, .timeout = 2 * kMillisecond});
  a.completion_count.wait_for(1);  // of this call or of `late`, whose deadline has passed in either case
  c.stop(0);
  a.wait_for_event(EventKind::kPeerLeft);
  a.stop();
  collects.join();
  // The pool may have taken the timeout before the wait set existed.
  const auto status = [&](std::uint64_t call, int target) {
    return found.contains(call) ? found.at(call).status : a.completions.at(target).status;
  };
  CHECK(status(late, 0) == CallStatus::kTimedOut);
  CHECK(status(lost, 1) == CallStatus::kPeerLost);
  CHECK(status(stopped, 2) == CallStatus::kStopped);
}

CASE(completions_taken_by_the_pool_are_elsewhere) {
  Worker a(0, {}, 0), b(1);
  introduce({&a, &b}, "unix");
  const std::uint64_t in_progress = a.start(1, 0, {.body = "being processed"});
  CHECK_EQ(body_of(a.call(1, {.body = "behind it"})), "behind it");
  const std::uint64_t put_down = a.start(1, 1, {.body = "put down"});
  const std::uint64_t to_come = a.start(1, 2, {.tag = kHold, .body = "to come"});
  CHECK_EQ(body_of(a.call(1, {.body = "behind it"})), "behind it");
  PoolThread pool;
  WorkItem item;
  do {  // the peer event of the connection comes first
    CHECK(a.engine->next(pool, item));
  } while (item.kind == WorkKind::kEvent);
  CHECK_EQ(item.message.header.call_id, in_progress);
  WaitSetScope set(a, {in_progress, put_down, to_come});
  CHECK(set.began);
  CHECK(set.wait_set.taken_elsewhere == std::vector{in_progress});
  CHECK_EQ(set.next().size(), 1u);
  Event waiting;
  std::thread other([&] {
    waiting.wait();
    a.engine->notify_wait_sets();
  });
  waiting.set();
  CHECK(set.next().empty());  // it has been woken, and more completions are expected
  CHECK(!set.wait_set.exhausted);
  other.join();
  b.release.set();
  CHECK_EQ(body_of(set.all().at(to_come)), "to come");
  CHECK(set.wait_set.exhausted);
}

CASE(after_the_stop_completions_are_not_queued_for_an_empty_pool) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  std::vector<std::uint64_t> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(a.start(1, i, {.tag = kNoAnswer}));
  WaitSetScope set(a, calls);
  CHECK(set.began);
  a.stop(0);
  std::deque<WorkItem> came = set.next();
  CHECK_EQ(came.size(), 3u);
  came.pop_front();
  CHECK_EQ(set.end(std::move(came)).size(), 2u);
}

/// A pool thread that blocks in the first completion, like a long callback.
class HeldUp {
 public:
  explicit HeldUp(Worker& worker) : thread_([this, &worker] { run(worker); }) { taken_.wait(); }
  ~HeldUp() {
    release_.set();
    thread_.join();
  }

 private:
  void run(Worker& worker) {
    PoolThread self;
    WorkItem item;
    while (worker.engine->next(self, item) && item.kind != WorkKind::kExitThread) {
      if (item.kind == WorkKind::kRequest) worker.answer(item, std::string(item.message.body_view()));
      if (item.kind != WorkKind::kCompletion || taken_.is_set()) continue;
      taken_.set();
      release_.wait();
      return;
    }
  }

  Event taken_, release_;
  std::thread thread_;
};

/// Gives a pool thread time to park, for which there is no event. A case is valid without it, but covers less.
void pause(Nanos time) {
  for (const Nanos until = now() + time; now() < until;) std::this_thread::yield();
}

CASE_ON_EVERY_SCHEME(requests_are_read_while_a_thread_runs_a_completion) {
  for (int round = 0; round < times(20); ++round) {
    Worker a(0, {}, 0), b(1);
    introduce({&a, &b}, scheme);
    a.start(1, 0, {.body = "keeps a thread"});
    HeldUp held_up(a);
    a.add_threads(2);
    for (int i = 0; i < 20; ++i) {
      CHECK_EQ(body_of(b.call(0, {.body = "heard", .timeout = 5 * kSecond})), "heard");
      pause(kMillisecond / 2);  // then `a` parks
    }
  }
}

CASE_ON_EVERY_SCHEME(completions_run_while_another_one_blocks) {
  Worker a(0, {}, 0), b(1);
  introduce({&a, &b}, scheme);
  a.start(1, 0, {.body = "keeps a thread"});
  HeldUp held_up(a);
  a.add_threads(2);
  const Nanos deadline = now() + 10 * kSecond;
  a.start(1, 1, {.body = "while requests come"});
  while (a.completion_count.value() < 1 && now() < deadline) b.call(0, {.body = "a request"});
  CHECK_EQ(a.completion_count.value(), 1);
  a.start(1, 2, {.body = "while a thread takes others"});
  for (int target = 3; a.completion_count.value() < 2 && now() < deadline; target += 2) {
    const std::uint64_t calls[] = {a.start(1, -1, {}), a.start(1, target, {}), a.start(1, target + 1, {})};
    Completion o;
    for (const std::uint64_t call : calls) a.engine->wait(call, kNever, {}, o);  // unless the pool has taken it
  }
  CHECK(a.completion_count.value() >= 2);
}

CASE_ON_EVERY_SCHEME(received_completions_run_while_another_one_blocks) {
  for (int round = 0; round < 5; ++round) {
    Settings settings;
    settings.spin = 5 * kMillisecond;
    Worker a(0, std::move(settings), 0), b(1);
    a.on_custom = [&a](WorkItem& item) {
      pause(3 * kMillisecond);  // another thread parks
      a.answer(item, "");
    };
    introduce({&a, &b}, scheme);
    a.start(1, 0, {.body = "keeps a thread"});
    HeldUp held_up(a);
    a.add_threads(2);
    a.start(1, 1, {.tag = kHold, .body = "read by a thread that spins after a request, and then idles"});
    b.call(0, {.tag = kCustom});
    const Nanos released_at = now();
    b.release.set();
    a.completion_count.wait_for(1);
    CHECK(now() - released_at < 5 * kSecond);  // not only when an unrelated timer fires
  }
}

CASE(completions_left_by_a_wait_set_run_while_another_one_blocks) {
  Worker a(0, {}, 0), b(1);
  introduce({&a, &b}, "unix");
  a.start(1, 0, {.body = "keeps a thread"});
  HeldUp held_up(a);
  a.add_threads(2);
  WaitSetScope set(a, {a.start(1, 1, {.body = "left"})});
  std::deque<WorkItem> came = set.next();
  pause(5 * kMillisecond);  // no other timer is left that could fire
  set.end(std::move(came));
  a.completion_count.wait_for(1);
}

CASE_ON_EVERY_SCHEME(several_wait_sets_alongside_callers) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  std::vector<std::thread> threads;
  std::atomic<int> collected = 0;
  const int rounds = times(100);
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < rounds; ++round) {
        std::vector<std::uint64_t> calls;
        for (int i = 0; i < 20; ++i) calls.push_back(a.start(1, (t * rounds + round) * 20 + i, {.body = "async"}));
        WaitSetScope set(a, calls);
        CHECK(set.began);
        collected += static_cast<int>(set.all().size());
        CHECK_EQ(body_of(a.call(1, {.body = "sync"})), "sync");
      }
    });
  }
  for (auto& t : threads) t.join();
  a.completion_count.wait_for(3 * 20 * rounds - collected);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

}  // namespace
}  // namespace telegrad::test

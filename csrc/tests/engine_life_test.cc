// Start and stop of engines: no thread or descriptor is leaked, and an idle engine uses no processor time.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

CASE(stop_ends_waiting_callers) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  Completion completions[3];
  std::vector<std::thread> callers;  // one of them is the leader, the others sleep
  for (Completion& o : completions) callers.emplace_back([&] { o = a.call(1, {.tag = kNoAnswer}); });
  a.start(1, 7, {.tag = kNoAnswer});
  b.handled.wait_for(4);
  a.stop(0);
  for (auto& c : callers) c.join();
  for (const Completion& o : completions) CHECK(o.status == CallStatus::kStopped);
  CHECK(a.completions.at(7).status == CallStatus::kStopped);
  CHECK(a.call(1, {}).status == CallStatus::kStopped);
  CHECK_EQ(b.wait_for_event(EventKind::kPeerLeft), "it shut down");
}

CASE(stop_while_all_threads_call) {
  for (int round = 0; round < times(50); ++round) {
    Worker a(0), b(1);
    introduce({&a, &b}, "unix");
    Counter begun;
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t) {
      callers.emplace_back([&, t] {
        Worker& from = t % 2 ? a : b;
        for (int i = 0;; ++i) {
          from.start(t % 2, t * 1'000'000 + i, {.never_wait = true});
          const Completion o =
              from.call(t % 2, {.tag = static_cast<std::uint8_t>(i % 3 ? kEcho : kBounce), .body = "\3"});
          begun.add();
          if (o.status == CallStatus::kStopped) return;
          if (o.status != CallStatus::kReplied) {
            CHECK(o.status == CallStatus::kPeerLost || o.status == CallStatus::kUnreachable);
          }
          if (o.status == CallStatus::kPeerLost) {
            CHECK(o.why == "it shut down" || o.why.find("closed by its process") != std::string::npos ||
                  o.why.find("reset") != std::string::npos || o.why.find("middle") != std::string::npos);
          }
        }
      });
    }
    begun.wait_for(20);
    std::thread other([&] { b.stop(0); });
    a.stop(0);
    other.join();
    for (auto& c : callers) c.join();
    CHECK_EQ(a.engine->stats().connections, 0u);
  }
}

CASE(stop_with_the_pool_in_every_state) {
  for (int threads = 0; threads < 5; ++threads) {  // asleep, parked, polling, not started yet
    for (int i = 0; i < times(100); ++i) {
      Worker a(0, {}, threads);
      if (i % 2) a.engine->request_callback(0);
      if (i % 3) std::this_thread::yield();
      a.stop(0);
      a.stop(0);
    }
  }
}

CASE(queued_messages_are_sent_before_the_end) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  Counter got;
  b.on_custom = [&](WorkItem&) { got.add(); };
  const std::string body(1 << 20, 'x');
  CHECK_EQ(body_of(a.call(1, {.body = "hello"})), "hello");
  for (int i = 0; i < 20; ++i) {
    Request r{.tag = kCustom, .body = body};
    CHECK(a.engine->send(1, compose(r)));
  }
  a.stop(30 * kSecond);
  got.wait_for(20);
  CHECK_EQ(b.wait_for_event(EventKind::kPeerLeft), "it shut down");
}

CASE(messages_without_a_connection_are_sent_before_the_end) {
  for (int i = 0; i < times(50); ++i) {
    Worker a(0), b(1);
    introduce({&a, &b}, "unix");
    Event got;
    b.on_custom = [&](WorkItem&) { got.set(); };
    Request r{.tag = kCustom};
    CHECK(a.engine->send(1, compose(r)));
    a.stop(30 * kSecond);
    got.wait();
  }
}

/// The time limit of `stop` is one for all connections, not one for each.
SLOW_CASE(stop_is_bounded) {
  Worker a(0);
  std::vector<std::unique_ptr<Puppet>> puppets;
  const std::string body(8 << 20, 'x');
  for (int i = 1; i <= 5; ++i) {
    puppets.push_back(std::make_unique<Puppet>(i));
    a.engine->set_peer(puppets.back()->address());
    a.start(i, i, {.body = body, .never_wait = true});
    puppets.back()->accept();  // and never reads
  }
  const Nanos start = now();
  a.stop(kSecond);
  CHECK(now() - start < 3 * kSecond);
}

CASE_ON_EVERY_SCHEME(no_descriptor_leaks) {
  auto live = [&] {
    Worker a(0), b(1), c(2);
    introduce({&a, &b, &c}, scheme);
    for (int i = 0; i < 3; ++i) {
      for (Worker* w : {&a, &b, &c}) {
        for (int to = 0; to < 3; ++to) CHECK_EQ(body_of(w->call(to, {.body = "x", .segments = {"yz"}})), "x");
      }
    }
    a.call(7, {});
    b.stop();
    a.wait_for_event(EventKind::kPeerLeft);
    a.call(1, {});
  };
  live();
  const int descriptors = open_descriptors(), tasks = threads(), kept = Bytes::live;
  for (int i = 0; i < 5; ++i) live();
  CHECK_EQ(open_descriptors(), descriptors);
  wait_for_threads(tasks);
  CHECK_EQ(Bytes::live.load(), kept);
}

/// Shared memory of a lost peer is unmapped too, even if nothing else happens that would drop the connection.
CASE_ON_EVERY_SCHEME(a_lost_peer_leaks_nothing) {
  Worker a(0);
  const int before = open_descriptors();
  for (int i = 0; i < 10; ++i) {
    {
      Worker b(1);
      introduce({&b}, scheme);
      a.meet(b);
      for (int n = 0; n < 3; ++n) {
        CHECK_EQ(body_of(a.call(1, {.body = "x", .segments = {std::string(1 << 20, 'y')}})), "x");
      }
      b.stop();
    }
    while (open_descriptors() > before) std::this_thread::yield();
  }
}

CASE_ON_EVERY_SCHEME(a_stopped_engine_keeps_no_descriptor) {
  const int before = open_descriptors();
  Worker alone(0);
  const int of_one = open_descriptors() - before;
  for (int i = 0; i < times(10); ++i) {
    Worker a(1), b(2), c(3), d(4);
    introduce({&a, &b, &c, &d}, scheme);
    for (int to = 2; to <= 4; ++to) {
      for (int n = 0; n < 3; ++n) {
        CHECK_EQ(body_of(a.call(to, {.body = "x", .segments = {std::string(1 << 20, 'y')}})), "x");
      }
    }
    for (Worker* w : {&a, &b, &c, &d}) w->stop();
    while (open_descriptors() > before + 5 * of_one) std::this_thread::yield();
  }
}

/// Every operation of a child on its parent's engine returns at once as stopped, whatever the parent was doing.
CASE(a_forked_child_has_a_stopped_engine) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  MemoryBudget of_parent(1 << 30);
  CHECK(of_parent.reserve(1));
  const std::uint64_t waited_for = a.start(1, 1, {.tag = kHold});
  std::atomic<bool> enough = false;
  std::vector<std::thread> busy;
  busy.emplace_back([&] {
    Completion o;
    CHECK(a.engine->wait(waited_for, kNever, {}, o) == WaitEnd::kDone);
  });
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&] {
      while (!enough) a.call(1, {.body = "y", .segments = {std::string(5000, 's')}});
    });
  }
  for (int i = 0; i < times(40); ++i) {
    const std::uint64_t call = a.start(1, 100 + i, {.tag = kHold});
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      Completion o, p, q;
      const bool stopped = a.engine->wait(call, kNever, {}, o) == WaitEnd::kDone && o.status == CallStatus::kStopped &&
                           a.engine->wait(waited_for, kNever, {}, p) == WaitEnd::kDone &&
                           p.status == CallStatus::kStopped && a.engine->wait(12345, kNever, {}, q) == WaitEnd::kDone &&
                           q.why == kForked;
      const bool refused = a.call(1, {}).status == CallStatus::kStopped;
      a.engine->request_callback(0);
      a.engine->stats();
      a.engine->stop(kSecond);
      a.engine.reset();
      if (MemoryBudget(1).used() > 0) _exit(3);
      _exit(stopped ? refused ? 0 : 2 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  enough = true;
  b.release.set();
  for (auto& t : busy) t.join();
  a.completion_count.wait_for(times(40));
  of_parent.release(1);
}

CASE(unneeded_threads_are_not_started) {
  Worker a(0), b(1, {}, 1);
  introduce({&a, &b}, "unix");
  for (int i = 0; i < times(2000); ++i) CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  CHECK(b.engine->stats().pool_threads <= 4);  // a preempted thread may have needed another one
}

Nanos processor_time() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * kSecond + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * kMicrosecond;
}

SLOW_CASE(an_idle_engine_uses_no_processor) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  for (int i = 0; i < 100; ++i) a.call(1, {.body = "x"});
  std::thread waits([&] { a.call(1, {.tag = kHold}); });
  a.start(1, 1, {.tag = kHold});
  b.handled.wait_for(102);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the time to measure, not a wait for an event
  const Nanos before = processor_time();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  CHECK(processor_time() - before < 20 * kMillisecond);  // 1 % of a core
  b.release.set();
  waits.join();
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

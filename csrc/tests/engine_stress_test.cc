// Four workers call each other at random while connections are cut and one worker dies and returns. Every call ends
// with exactly one completion, and nothing is leaked.
#include <shared_mutex>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

constexpr int kWorkers = 4;

class World {
 public:
  World(const std::string& scheme, std::uint64_t seed, Nanos span) : scheme_(scheme), seed_(seed), end_(now() + span) {
    for (int i = 0; i < kWorkers; ++i) workers_.push_back(fresh(i));
    for (int i = 0; i < kWorkers; ++i) publish(i);
  }

  void run() {
    std::vector<std::thread> threads;
    for (int i = 0; i < 2 * (kWorkers - 1); ++i) threads.emplace_back([this, i] { call_around(i); });
    threads.emplace_back([this] { cut_links(); });
    threads.emplace_back([this] { die_and_return(); });
    for (auto& t : threads) t.join();
    for (int i = 0; i < kWorkers - 1; ++i) {
      Worker& w = *workers_[static_cast<std::size_t>(i)];
      w.completion_count.wait_for(started_[i]);
      CHECK_EQ(w.completions.size(), static_cast<std::size_t>(started_[i].load()));
      while (w.engine->stats().pending_calls > 0) {  // handlers of failed calls may still be calling
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    CHECK(replied_ > 0);
  }

 private:
  std::unique_ptr<Worker> fresh(int id) {
    Settings s = Worker::settings_of(id);
    s.handlers = 4;
    s.window = 200'000;
    auto w = std::make_unique<Worker>(id, s);
    w->on_custom = [](WorkItem&) {};  // one-way messages
    return w;
  }

  void publish(int id) {
    Worker& w = *workers_[static_cast<std::size_t>(id)];
    w.listen(scheme_);
    for (auto& other : workers_) {
      other->meet(w);
      w.meet(*other);
    }
  }

  /// Run by threads of the workers that do not die.
  void call_around(int thread) {
    Random random(seed_ * 100 + static_cast<std::uint64_t>(thread));
    const int from = thread % (kWorkers - 1);
    Worker& w = *workers_[static_cast<std::size_t>(from)];
    while (now() < end_) {
      const int to = static_cast<int>(random.below(kWorkers + 1));  // the last id does not exist
      Request r{.body = random.bytes(random.below(random.below(10) ? 100 : 100'000))};
      if (random.below(10) == 0) r.segments = {random.bytes(random.below(1'000'000)), random.bytes(random.below(100))};
      if (random.below(5) == 0) r.timeout = static_cast<Nanos>(random.below(3 * kMillisecond)) + 1;
      if (random.below(5) == 0) r.keep_alive = std::make_unique<Bytes>();
      r.name_id = static_cast<std::uint32_t>(random.below(5));
      if (r.name_id) r.name = "name" + std::to_string(r.name_id);
      switch (random.below(6)) {
        case 0:
        case 1: {
          const std::string body = r.body;
          const Completion o = w.call(to, std::move(r));
          CHECK(o.status != CallStatus::kPending && o.status != CallStatus::kStopped);
          if (o.status == CallStatus::kReplied) {
            CHECK(body_of(o) == body);
            ++replied_;
          }
          break;
        }
        case 2:
        case 3: {
          r.never_wait = random.below(2);
          const int target = started_[from]++;
          const std::uint64_t call = w.start(to, target, std::move(r));
          if (random.below(4) == 0) {
            Completion o;
            if (w.engine->wait(call, now() + static_cast<Nanos>(random.below(kMillisecond)), {}, o) == WaitEnd::kDone) {
              std::lock_guard lock(w.mutex);
              CHECK(w.completions.emplace(target, std::move(o)).second);
              w.completion_count.add();
            }
          }
          break;
        }
        case 4:
          r.tag = kBounce;
          r.timeout = 0;
          r.body = std::string(1, static_cast<char>(random.below(8)));
          w.call(to, std::move(r));
          break;
        default:
          r.tag = kCustom;
          w.engine->send(to, compose(r));
      }
    }
  }

  void cut_links() {
    Random random(seed_ + 1);
    while (now() < end_) {
      const auto a = random.below(kWorkers - 1), b = random.below(kWorkers);
      workers_[a]->engine->remove_peer(static_cast<int>(b), "cut");
      {
        std::shared_lock lock(mutex_);
        workers_[a]->meet(*workers_[b]);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + random.below(20)));  // paces the loop
    }
  }

  void die_and_return() {
    Random random(seed_ + 2);
    while (now() < end_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + random.below(50)));
      Worker& mortal = *workers_[kWorkers - 1];
      mortal.stop(random.below(2) ? 0 : 10 * kMillisecond);
      std::unique_lock lock(mutex_);
      workers_[kWorkers - 1] = fresh(kWorkers - 1);
      publish(kWorkers - 1);
    }
  }

  const std::string scheme_;
  const std::uint64_t seed_;
  const Nanos end_;
  std::shared_mutex mutex_;  // for all threads that use the mortal worker except its own
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<int> started_[kWorkers] = {};
  std::atomic<int> replied_ = 0;
};

void stress(const std::string& scheme, Nanos span) {
  const int before = Bytes::live;
  for (std::uint64_t seed = 1; seed <= 2; ++seed) World(scheme, seed, span).run();
  CHECK_EQ(Bytes::live.load(), before);
}

CASE_ON_EVERY_SCHEME(a_short_stress_test) { stress(scheme, 300 * kMillisecond); }

void a_long_storm(const std::string& scheme) { stress(scheme, 8 * kSecond); }
[[maybe_unused]] const bool registered = on_every_scheme("a_long_storm", a_long_storm, true);

}  // namespace
}  // namespace telegrad::test

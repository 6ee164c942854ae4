#include "tests/check.h"

#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TELEGRAD_SANITIZED 1
extern "C" void __sanitizer_print_stack_trace();
#endif

namespace telegrad::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  std::function<void()> body;
  bool slow;
};

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::string current = "(none)";
std::function<void()> hang_report;
std::mutex hang_mutex;

template <class F>
void for_each_entry(const char* folder, F f) {
  DIR* d = opendir(folder);
  if (!d) return;
  while (const dirent* e = readdir(d)) {
    if (e->d_name[0] != '.') f(e->d_name);
  }
  closedir(d);
}

int count_entries(const char* folder) {
  int n = 0;
  for_each_entry(folder, [&](const char*) { ++n; });
  return n;
}

// ---- the watchdog

std::atomic<bool> stack_printed = false;

void print_stack(int) {
#ifdef TELEGRAD_SANITIZED
  __sanitizer_print_stack_trace();
#else
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
#endif
  stack_printed = true;
}

void print_all_stacks() {
  const long self = syscall(SYS_gettid);
  for_each_entry("/proc/self/task", [&](const char* name) {
    const long tid = std::atol(name);
    if (tid == self) return;
    const std::string task = std::string("/proc/self/task/") + name;
    std::string where;
    std::getline(std::ifstream(task + "/wchan"), where);
    std::fprintf(stderr, "---- thread %ld, in the kernel at %s\n", tid, where.c_str());
    stack_printed = false;
    syscall(SYS_tgkill, getpid(), tid, SIGUSR2);
    // The thread sanitizer does not deliver signals to threads inside system calls that it does not know.
    for (int i = 0; i < 100 && !stack_printed; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!stack_printed) std::fprintf(stderr, "     (it does not answer)\n");
  });
}

class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    set(Clock::time_point::max());
    {
      std::lock_guard lock(mutex_);
      over_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  void set(Clock::time_point deadline) {
    std::lock_guard lock(mutex_);
    deadline_ = deadline;
    changed_.notify_all();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (deadline_ == Clock::time_point::max()) {
        changed_.wait(lock);
      } else if (Clock::now() < deadline_) {
        changed_.wait_until(lock, deadline_);
      } else {
        bark();
      }
    }
  }
  [[noreturn]] static void bark() {
    alarm(60);  // in case the report hangs
    std::fprintf(stderr, "\nHANG in %s\n", current.c_str());
    {
      std::lock_guard lock(hang_mutex);
      if (hang_report) hang_report();
    }
    print_all_stacks();
    std::fflush(nullptr);
    _exit(3);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point deadline_ = Clock::time_point::max();
  bool over_ = false;
  std::thread thread_;
};

}  // namespace

void add_case(std::string name, std::function<void()> body, bool slow) {
  cases().push_back({std::move(name), std::move(body), slow});
}

void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "\nFAILED %s\n  %s:%d: %s\n", current.c_str(), file, line, what.c_str());
  std::fflush(nullptr);
  _exit(1);  // threads of the case may still be running
}

bool sanitized() {
#ifdef TELEGRAD_SANITIZED
  return true;
#else
  return false;
#endif
}

int times(int n) { return sanitized() ? (n + 9) / 10 : n; }

void on_hang(std::function<void()> report) {
  std::lock_guard lock(hang_mutex);
  hang_report = std::move(report);
}

std::string Random::bytes(std::size_t n) {
  std::string s(n, '\0');
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const std::uint64_t x = next();
    std::memcpy(s.data() + i, &x, 8);
  }
  for (; i < n; ++i) s[i] = static_cast<char>(next());
  return s;
}

int open_descriptors() { return count_entries("/proc/self/fd"); }

int threads() { return count_entries("/proc/self/task"); }

void wait_for_threads(int n) {
  while (threads() > n) std::this_thread::yield();
}

}  // namespace telegrad::test

int main(int argc, char** argv) {
  using namespace telegrad::test;
  signal(SIGUSR2, print_stack);
  signal(SIGPIPE, SIG_IGN);
  const char* slow = std::getenv("TELEGRAD_SLOW_TESTS");
  const bool run_slow = slow && *slow && std::strcmp(slow, "0") != 0;
  const char* limit = std::getenv("TELEGRAD_TEST_SECONDS");  // for each case
  const auto seconds = std::chrono::seconds(limit ? std::atoi(limit) : run_slow ? 300 : 40);
  Watchdog watchdog;
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const Case& c : cases()) std::puts(c.name.c_str());
    return 0;
  }
  int count = 0;
  for (const Case& c : cases()) {
    bool chosen = argc == 1 && (!c.slow || run_slow);
    for (int i = 1; i < argc; ++i) chosen = chosen || c.name.find(argv[i]) != std::string::npos;
    if (!chosen) continue;
    current = c.name;
    const auto start = Clock::now();
    watchdog.set(start + seconds);
    c.body();
    watchdog.set(Clock::time_point::max());
    on_hang(nullptr);
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    std::printf("%6lld ms  %s\n", static_cast<long long>(took.count()), c.name.c_str());
    std::fflush(stdout);
    ++count;
  }
  if (count == 0) {
    std::fprintf(stderr, "no such case\n");
    return 2;
  }
  return 0;
}

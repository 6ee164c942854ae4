// The test harness of the core: named cases, checks, and a watchdog that reports the stacks of a case that hangs.
//
//     CASE(a_thing_happens) { CHECK_EQ(1 + 1, 2); }
//
// A program runs all its cases, or those with a name that contains one of its arguments. A failed check ends the
// program. A SLOW_CASE runs only if TELEGRAD_SLOW_TESTS is set, or if it is named on the command line.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>

namespace telegrad::test {

void add_case(std::string name, std::function<void()> body, bool slow = false);
[[noreturn]] void fail(const char* file, int line, const std::string& what);

/// True with a sanitizer: repetitions that only add confidence are fewer then.
bool sanitized();
/// Returns `n` repetitions, or fewer with a sanitizer.
int times(int n);

/// Additional report about a case that hangs, called by the watchdog; may be null.
void on_hang(std::function<void()> report);

struct Registrar {
  Registrar(const char* name, void (*body)(), bool slow) { add_case(name, body, slow); }
};

template <class A, class B>
void check_eq(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  if constexpr (requires { out << a << b; }) {
    out << expression << ": " << a << " is not " << b;
  } else {
    out << expression;
  }
  fail(file, line, out.str());
}

/// Event that happens once and can be waited for. No timeout: the watchdog has one.
class Event {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return set_; });
  }
  bool is_set() {
    std::lock_guard lock(mutex_);
    return set_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

/// Number that only grows and can be waited for.
class Counter {
 public:
  int add(int n = 1) {
    std::lock_guard lock(mutex_);
    value_ += n;
    changed_.notify_all();
    return value_;
  }
  int value() {
    std::lock_guard lock(mutex_);
    return value_;
  }
  void wait_for(int n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return value_ >= n; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int value_ = 0;
};

/// Reproducible pseudo-random numbers (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  std::string bytes(std::size_t n);

 private:
  std::uint64_t state_;
};

int open_descriptors();
int threads();
/// Waits until this process has at most `n` threads: a joined thread may still be listed for a short time.
void wait_for_threads(int n);

}  // namespace telegrad::test

#define CASE(name)                                                               \
  static void name();                                                            \
  static const ::telegrad::test::Registrar name##_registrar{#name, name, false}; \
  static void name()
#define SLOW_CASE(name)                                                         \
  static void name();                                                           \
  static const ::telegrad::test::Registrar name##_registrar{#name, name, true}; \
  static void name()

#define CHECK(...)                                                                \
  do {                                                                            \
    if (!(__VA_ARGS__)) ::telegrad::test::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)
#define CHECK_EQ(a, b) ::telegrad::test::check_eq(a, b, #a " == " #b, __FILE__, __LINE__)
/// Checks that `text` contains `part`.
#define CHECK_SAYS(text, part)                                                                                  \
  do {                                                                                                          \
    const std::string says_text = (text);                                                                       \
    if (says_text.find(part) == std::string::npos)                                                              \
      ::telegrad::test::fail(__FILE__, __LINE__, std::string(#text " says \"") + says_text + "\", not " #part); \
  } while (false)

// Baseline of the machine: the operations that a call needs, without a framework. Prints one time in seconds per line.
//
// clang-format off
//     baseline ring SECONDS                            round trip through shared memory between two spinning processes
//     baseline apart                                   the same at its best, between the first and last allowed core
//     baseline memcpy BYTES SECONDS                    copy within warm memory
//     baseline echo SECONDS                            round trip of 64 bytes over loopback TCP
//     baseline stream BYTES SECONDS                    bytes one way over loopback TCP, and a byte back
//     baseline serve ADDRESS                           serves one `baseline send`; prints its port first
//     baseline send ADDRESS PORT BYTES SECONDS         the same as stream, to `baseline serve`
// clang-format on
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

/// Runs `once` for `seconds` after a warm-up of a tenth of it, and prints its times.
template <class F>
void repeat(double seconds, F once) {
  for (const double end = now() + seconds / 10; now() < end;) once();
  std::vector<double> times;
  for (const double end = now() + seconds; times.size() < 3 || (now() < end && times.size() < 200000);) {
    const double start = now();
    once();
    times.push_back(now() - start);
  }
  for (const double t : times) std::printf("%.9f\n", t);
}

/// Starts a process that runs `body` and is killed when this one ends.
template <class F>
pid_t child(F body) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    _exit(0);
  }
  return pid;
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

// ---- shared memory

struct SharedCounters {
  alignas(64) std::atomic<std::uint64_t> there = 0;
  alignas(64) std::atomic<std::uint64_t> back = 0;
};

/// Yields now and then: on one core the other process must run too.
void spin_until(const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  for (std::uint32_t spins = 1; counter.load(std::memory_order_acquire) != value; ++spins) {
    if (spins % 4096 == 0) sched_yield();
  }
}

SharedCounters& shared_counters() {
  void* memory = mmap(nullptr, sizeof(SharedCounters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("mmap");
  return *new (memory) SharedCounters;
}

[[noreturn]] void answer(SharedCounters& counters) {
  for (std::uint64_t i = 1;; ++i) {
    spin_until(counters.there, i);
    counters.back.store(i, std::memory_order_release);
  }
}

void ring(double seconds) {
  SharedCounters& counters = shared_counters();
  const pid_t other = child([&] { answer(counters); });
  std::uint64_t i = 0;
  repeat(seconds, [&] {
    counters.there.store(++i, std::memory_order_release);
    spin_until(counters.back, i);
  });
  end(other);
}

void stay_on(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (sched_setaffinity(0, sizeof only, &only) != 0) die("sched_setaffinity");
}

/// Few round trips together, and of many such times the best: another process may have the core in between.
void apart() {
  constexpr int kTimes = 40, kRoundTrips = 200;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) die("sched_getaffinity");
  int first = -1, last = -1;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (first < 0) first = core;
    last = core;
  }
  SharedCounters& counters = shared_counters();
  const pid_t other = child([&] {
    stay_on(last);
    answer(counters);
  });
  stay_on(first);
  std::uint64_t i = 0;
  for (int time = 0; time < kTimes; ++time) {
    const double start = now();
    for (int once = 0; once < kRoundTrips; ++once) {
      counters.there.store(++i, std::memory_order_release);
      spin_until(counters.back, i);
    }
    std::printf("%.9f\n", (now() - start) / kRoundTrips);
  }
  end(other);
}

void copy(std::size_t bytes, double seconds) {
  const std::unique_ptr<char[]> from(new char[bytes]), to(new char[bytes]);
  std::memset(from.get(), 1, bytes);
  std::memset(to.get(), 2, bytes);
  repeat(seconds, [&] {
    std::memcpy(to.get(), from.get(), bytes);
    asm volatile("" ::"r"(to.get()) : "memory");
  });
}

// ---- TCP

sockaddr_in address_of(const char* host, int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(static_cast<std::uint16_t>(port));
  if (inet_pton(AF_INET, host, &a.sin_addr) != 1) die(host);
  return a;
}

int listen_on(const char* host, int& port) {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in a = address_of(host, 0);
  socklen_t size = sizeof a;
  if (s < 0 || bind(s, reinterpret_cast<sockaddr*>(&a), size) != 0 || listen(s, 1) != 0 ||
      getsockname(s, reinterpret_cast<sockaddr*>(&a), &size) != 0) {
    die("listen");
  }
  port = ntohs(a.sin_port);
  return s;
}

int connect_to(const char* host, int port) {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in a = address_of(host, port);
  if (s < 0 || connect(s, reinterpret_cast<const sockaddr*>(&a), sizeof a) != 0) die("connect");
  const int on = 1;
  setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return s;
}

bool read_all(int s, char* to, std::size_t size) {
  for (std::size_t got = 0; got < size;) {
    const ssize_t n = recv(s, to + got, size - got, 0);
    if (n <= 0) return false;
    got += static_cast<std::size_t>(n);
  }
  return true;
}

void write_all(int s, const char* from, std::size_t size) {
  for (std::size_t sent = 0; sent < size;) {
    const ssize_t n = send(s, from + sent, size - sent, MSG_NOSIGNAL);
    if (n <= 0) die("send");
    sent += static_cast<std::size_t>(n);
  }
}

/// Each transfer begins with its size; the answer is one byte.
void serve(int listener) {
  const int s = accept(listener, nullptr, nullptr);
  if (s < 0) die("accept");
  const int on = 1;
  setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::vector<char> memory;
  std::uint64_t size = 0;
  while (read_all(s, reinterpret_cast<char*>(&size), sizeof size)) {
    if (memory.size() < size) memory.resize(size);
    if (!read_all(s, memory.data(), size)) break;
    write_all(s, "!", 1);
  }
  close(s);
}

void send_to(const char* host, int port, std::size_t bytes, double seconds) {
  const int s = connect_to(host, port);
  const std::vector<char> memory(bytes, 1);
  const std::uint64_t size = bytes;
  char answer;
  repeat(seconds, [&] {
    write_all(s, reinterpret_cast<const char*>(&size), sizeof size);
    write_all(s, memory.data(), bytes);
    if (!read_all(s, &answer, 1)) die("recv");
  });
  close(s);
}

void over_loopback(std::size_t bytes, double seconds) {
  int port = 0;
  const int listener = listen_on("127.0.0.1", port);
  const pid_t other = child([&] { serve(listener); });
  send_to("127.0.0.1", port, bytes, seconds);
  end(other);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  auto number = [&](std::size_t i) { return std::stod(args.at(i)); };
  auto size = [&](std::size_t i) { return static_cast<std::size_t>(std::stoull(args.at(i))); };
  if (args.size() == 2 && args[0] == "ring") {
    ring(number(1));
  } else if (args.size() == 1 && args[0] == "apart") {
    apart();
  } else if (args.size() == 3 && args[0] == "memcpy") {
    copy(size(1), number(2));
  } else if (args.size() == 2 && args[0] == "echo") {
    over_loopback(64, number(1));
  } else if (args.size() == 3 && args[0] == "stream") {
    over_loopback(size(1), number(2));
  } else if (args.size() == 2 && args[0] == "serve") {
    int port = 0;
    const int listener = listen_on(args[1].c_str(), port);
    std::printf("%d\n", port);
    std::fflush(stdout);
    serve(listener);
  } else if (args.size() == 5 && args[0] == "send") {
    send_to(args[1].c_str(), std::stoi(args[2]), size(3), number(4));
  } else {
    std::fprintf(stderr, "see the first lines of baseline.cc\n");
    return 2;
  }
  return 0;
}

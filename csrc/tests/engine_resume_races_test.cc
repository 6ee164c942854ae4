// What happens to a session while an attempt to continue it, or a lane for it, is inside `connect`, where no lock is
// held.
//
// This program replaces `connect` and `shutdown`, so that a case can wait for these calls, and hold one of them.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>

#include "tests/relay.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

std::string name_of_socket(int fd) {
  struct stat s{};
  ::fstat(fd, &s);
  return "socket:[" + std::to_string(s.st_ino) + "]";
}

/// The connections to one port, in the order in which they are made.
struct Dials {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint16_t port = 0;  // 0: none is recorded
  std::vector<int> fds;
  std::vector<std::string> sockets;
  std::vector<int> shut;                     // descriptors for which `shutdown` has been called
  std::function<void(std::size_t)> on_dial;  // called with the number of the connection, before it is made

  void watch(const std::string& address) {
    std::lock_guard lock(mutex);
    port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
    fds.clear();
    sockets.clear();
    shut.clear();
  }
  void forget() {
    std::lock_guard lock(mutex);
    port = 0;
    on_dial = nullptr;
  }
  void call_on_dial(std::function<void(std::size_t)> hook) {
    std::lock_guard lock(mutex);
    on_dial = std::move(hook);
  }
  std::size_t count() {
    std::lock_guard lock(mutex);
    return fds.size();
  }
  void wait_until_shut(std::size_t dial) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return std::find(shut.begin(), shut.end(), fds[dial]) != shut.end(); });
  }
  /// Returns whether a descriptor of this process refers to the socket.
  bool is_open(std::size_t dial) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry.path(), gone) == sockets[dial]) return true;
    }
    return false;
  }
} dials;

void on_connect(int fd, const sockaddr* address) {
  std::function<void(std::size_t)> hook;
  std::size_t number = 0;
  {
    std::lock_guard lock(dials.mutex);
    if (dials.port == 0 || address->sa_family != AF_INET) return;
    if (ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port) != dials.port) return;
    number = dials.fds.size();
    dials.fds.push_back(fd);
    dials.sockets.push_back(name_of_socket(fd));
    hook = dials.on_dial;
  }
  if (hook) hook(number);
}

void on_shutdown(int fd) {
  std::lock_guard lock(dials.mutex);
  dials.shut.push_back(fd);
  dials.changed.notify_all();
}

Settings resuming(int id, Nanos heartbeat) {
  Settings s = Worker::settings_of(id);
  s.handshake.resume = true;
  s.handshake.lanes = 2;
  s.heartbeat = heartbeat;
  return s;
}

/// Worker `a` has a session with `b` through a relay, and one with `other`, with which a case checks that the leader
/// of `a` has done what it had begun.
struct Trio {
  explicit Trio(Nanos heartbeat = 60 * kSecond) {
    a = std::make_unique<Worker>(0, resuming(0, heartbeat));
    relay = std::make_unique<Relay>(b.listen("tcp"));
    other.listen("unix");
    dials.watch(relay->address());
    a->engine->set_peer({.identity = b.address().identity, .addresses = {relay->address()}});
    a->meet(other);
    CHECK_EQ(body_of(a->call(1, {.body = "first"})), "first");
    call_other();
    CHECK_EQ(dials.count(), 1u);
  }
  ~Trio() {
    a.reset();
    dials.forget();
  }
  void call_other() { CHECK_EQ(body_of(a->call(2, {.body = "x"})), "x"); }
  Worker b{1, resuming(1, 60 * kSecond)}, other{2, resuming(2, 60 * kSecond)};
  std::unique_ptr<Relay> relay;
  std::unique_ptr<Worker> a;
};

/// The detector renews a silent connection, and the leader finds it broken meanwhile.
CASE(a_session_has_one_attempt_at_a_time) {
  for (bool done = false; !done;) {
    Event entered, go;
    std::atomic<bool> on_timer = false;
    Trio t(kSecond);
    dials.call_on_dial([&](std::size_t number) {
      if (number != 1) return;
      char name[16] = "";
      pthread_getname_np(pthread_self(), name, sizeof name);
      on_timer = std::string(name) == "telegrad-time";
      entered.set();
      if (on_timer) go.wait();
    });
    t.relay->frozen = true;
    entered.wait();
    done = on_timer;  // else the leader makes the attempt, so it cannot find the connection broken
    t.relay->reset();
    if (done) {
      dials.wait_until_shut(0);
      t.call_other();
      CHECK_EQ(dials.count(), 2u);
    }
    t.relay->frozen = false;
    go.set();
    CHECK_EQ(body_of(t.a->call(1, {.body = "again", .timeout = 20 * kSecond})), "again");
    CHECK_EQ(t.a->event_count.value(), 0);
  }
}

CASE(an_engine_that_stops_during_an_attempt_leaves_no_connection) {
  Event entered, go;
  Trio t;
  dials.call_on_dial([&](std::size_t) {
    entered.set();
    go.wait();
  });
  t.relay->reset();
  entered.wait();
  t.a->engine->stop(0);
  go.set();
  t.a.reset();
  CHECK_EQ(dials.count(), 2u);
  CHECK(!dials.is_open(1));
}

CASE(a_session_that_ends_during_an_attempt_leaves_no_connection) {
  Trio t;
  t.relay->frozen = true;  // an attempt is not answered
  dials.call_on_dial([&](std::size_t) { t.a->engine->remove_peer(1, "removed"); });
  t.relay->reset();
  t.a->wait_for_event(EventKind::kPeerLost);
  t.call_other();
  CHECK_EQ(dials.count(), 2u);
  CHECK_EQ(t.a->engine->stats().connections, 1u);
}

/// A large reply makes the link want a lane.
CASE(a_session_that_ends_while_a_lane_is_made_leaves_no_connection) {
  Trio t;
  dials.call_on_dial([&](std::size_t) {
    t.relay->frozen = true;
    t.a->engine->remove_peer(1, "removed");
  });
  t.a->call(1, {.body = "large", .segments = {std::string(40 << 20, 'x')}});
  t.a->wait_for_event(EventKind::kPeerLost);
  t.call_other();
  CHECK_EQ(dials.count(), 2u);
  CHECK_EQ(t.a->engine->stats().connections, 1u);
}

}  // namespace
}  // namespace telegrad::test

extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  telegrad::test::on_connect(fd, address);
  return static_cast<int>(::syscall(SYS_connect, fd, address, size));
}

extern "C" int shutdown(int fd, int how) noexcept {
  telegrad::test::on_shutdown(fd);
  return static_cast<int>(::syscall(SYS_shutdown, fd, how));
}

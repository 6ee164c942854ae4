// The failure detector of an engine: silent peers are lost, slow and busy ones are not. The kernel watches TCP for it.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "tests/relay.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings with_heartbeat(Nanos interval) {
  Settings s;
  s.handshake.me.id = -1;
  s.heartbeat = s.local_heartbeat = interval;
  return s;
}

CASE_ON_EVERY_SCHEME(a_silent_peer_is_lost) {
  const Nanos interval = 80 * kMillisecond;
  Worker a(0, with_heartbeat(interval));
  Puppet p(1, scheme);
  a.engine->set_peer(p.address());
  Completion completion;
  Nanos ended = 0;
  std::thread caller([&] {
    completion = a.call(1, {.body = "x"});  // without a deadline
    ended = now();
  });
  p.accept();
  CHECK(p.receive().header.type == FrameType::kRequest);
  const Nanos silent_since = now();
  CHECK(p.receive().header.type == FrameType::kPing);
  CHECK(p.receive().header.type == FrameType::kPing);
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK_SAYS(completion.why, "no sign of life");
  CHECK_SAYS(completion.why, "heartbeat: 0.08 s");
  CHECK(ended - silent_since >= 2 * interval);
  CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost), "no sign of life");
}

/// The answers keep a call that takes many intervals alive.
CASE_ON_EVERY_SCHEME(a_peer_that_answers_is_not_lost) {
  Worker a(0, with_heartbeat(40 * kMillisecond));
  Puppet p(1, scheme);
  a.engine->set_peer(p.address());
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.body = "x"}); });
  p.accept();
  const Incoming request = p.receive();
  for (int i = 0; i < 12; ++i) {
    CHECK(p.receive().header.type == FrameType::kPing);
    p.send(message(FrameType::kPong));
  }
  p.reply(request, "at last");
  caller.join();
  CHECK_EQ(body_of(completion), "at last");
  CHECK_EQ(a.event_count.value(), 0);
}

/// User code has all threads of the callee, so only the timer thread reads its links.
CASE_ON_EVERY_SCHEME(a_busy_peer_is_not_lost) {
  Worker a(0, with_heartbeat(250 * kMillisecond)), b(1, with_heartbeat(0), 1);
  b.starts_threads = false;
  introduce({&a, &b}, scheme);
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.tag = kHold, .body = "x"}); });
  b.handled.wait_for(1);
  const std::uint64_t before = a.engine->stats().received_messages;
  while (a.engine->stats().received_messages < before + 8) std::this_thread::yield();  // answers
  b.release.set();
  caller.join();
  CHECK_EQ(body_of(completion), "x");
  CHECK_EQ(a.event_count.value(), 0);
}

/// A caller that checks for signals may wait for the GIL, which user code holds. It is not the leader meanwhile.
CASE_ON_EVERY_SCHEME(a_caller_that_waits_for_the_gil_does_not_lead) {
  Worker a(0, with_heartbeat(0), 0), b(1, with_heartbeat(250 * kMillisecond));
  introduce({&a, &b}, scheme);
  Event checks, may_go_on;
  std::thread caller([&] {
    Request call{.tag = kHold, .body = "x"};
    const std::uint64_t id = a.engine->start(1, compose(call), {});
    Completion completion;
    const auto interrupted = [&] {
      checks.set();
      may_go_on.wait();
      return false;
    };
    CHECK(a.engine->wait(id, kNever, interrupted, completion) == WaitEnd::kDone);
    CHECK_EQ(body_of(completion), "x");
  });
  checks.wait();
  const std::uint64_t before = b.engine->stats().received_messages;
  while (b.engine->stats().received_messages < before + 6) std::this_thread::yield();  // answers
  may_go_on.set();
  b.release.set();
  caller.join();
  CHECK_EQ(b.event_count.value(), 0);
}

/// A peer that reads a large message slowly, and sends nothing, is alive.
CASE(a_slow_reader_is_not_lost) {
  const Nanos interval = 150 * kMillisecond;
  Worker a(0, with_heartbeat(interval));
  Puppet p(1, "unix");
  a.engine->set_peer(p.address());
  const std::string large(32 << 20, 'x');
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.segments = {large}}); });
  p.accept();
  std::size_t read = 0;
  const Nanos end = now() + 6 * interval;
  std::vector<char> buffer(256 << 10);
  while (now() < end) {
    const ssize_t n = ::recv(p.link->fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n > 0) read += static_cast<std::size_t>(n);
    polls(-1, 0, 10);  // the pace of the reader
  }
  CHECK(read < large.size());
  CHECK_EQ(a.event_count.value(), 0);
  p.link->close();
  caller.join();
  CHECK(completion.status == CallStatus::kPeerLost);
}

/// A worker, and a peer that accepts connections and never answers: they stay in its backlog.
struct Unanswered {
  Unanswered() { a.engine->set_peer(silent.address()); }
  static Settings settings() {
    Settings s = with_heartbeat(40 * kMillisecond);
    s.connect_timeout = 30 * kMillisecond;
    return s;
  }
  void check_loss() {
    CHECK_SAYS(a.wait_for_event(EventKind::kPeerLost),
               "within connect_timeout: it does not answer at " + silent.address().addresses.front());
  }
  Worker a{0, settings()};
  Puppet silent{1, "unix"};
};

/// Messages that must be delivered do not wait forever for a peer that accepts connections and never answers.
CASE(a_peer_that_never_answers_is_lost) {
  Unanswered u;
  CHECK(u.a.call(1, {.flags = kMustDeliver}).status == CallStatus::kUnreachable);
  u.check_loss();
}

/// No call waits for a message that connects two workers, so that each notices the loss of the other.
CASE(a_peer_that_never_answers_a_one_way_message_is_lost) {
  for (const auto flags : {0, +kMustDeliver}) {
    Unanswered u;
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kOneway;
    m->header.flags = static_cast<std::uint16_t>(flags);
    u.a.engine->send(1, std::move(m));
    u.check_loss();
  }
}

/// A request of the background that must be delivered, as one that creates a reference.
CASE(a_peer_that_never_answers_a_creation_is_lost) {
  Unanswered u;
  auto m = std::make_unique<Outgoing>();
  m->header.flags = kMustDeliver;
  u.a.engine->start(1, std::move(m), {.background = true, .target = std::make_unique<Bytes>("1")});
  u.a.completion_count.wait_for(1);
  CHECK(u.a.completions.at(1).status == CallStatus::kUnreachable);
  u.check_loss();
}

/// Messages with borrowed memory have that limit too, although their callers wait until the calls expire.
CASE(a_peer_that_never_answers_a_borrowed_message_is_lost) {
  Unanswered u;
  std::string segment(1 << 20, 'a');
  auto m = std::make_unique<Outgoing>();
  m->header.flags = kMustDeliver;
  m->segments.push_back({reinterpret_cast<const std::byte*>(segment.data()), segment.size()});
  m->owner = std::make_unique<Bytes>();
  u.a.engine->start(1, std::move(m), {.target = std::make_unique<Bytes>("1")});
  u.a.completion_count.wait_for(1);
  CHECK(u.a.completions.at(1).status == CallStatus::kUnreachable);
  u.check_loss();
}

int option(int fd, int level, int name) {
  int value = 0;
  socklen_t size = sizeof value;
  CHECK_EQ(getsockopt(fd, level, name, &value, &size), 0);
  return value;
}

/// Returns how the kernel watches the connections of this process to a port, or those that were accepted there: the
/// seconds before and between probes, their number, and the milliseconds without an acknowledgement. "": not at all.
std::vector<std::string> watched(const std::string& address, bool accepted) {
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_in mine{}, theirs{};
    socklen_t size = sizeof mine, their_size = sizeof theirs;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &size) != 0 || mine.sin_family != AF_INET) continue;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &their_size) != 0) continue;  // a listener
    if (ntohs((accepted ? mine : theirs).sin_port) != port) continue;
    std::string how;
    if (option(fd, SOL_SOCKET, SO_KEEPALIVE) != 0) {
      for (const int name : {TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT})
        how += (how.empty() ? "" : " ") + std::to_string(option(fd, IPPROTO_TCP, name));
    }
    all.push_back(how);
  }
  std::sort(all.begin(), all.end());
  return all;
}

/// A lane has no limit without an acknowledgement: its peer may leave it unread. It is probed like the others.
CASE(the_kernel_watches_both_ends_over_tcp_and_their_lanes) {
  const auto settings = [](int id, Nanos interval) {
    Settings s = Worker::settings_of(id);
    s.handshake.resume = true;
    s.handshake.lanes = 2;
    s.heartbeat = interval;
    return s;
  };
  Worker a(0, settings(0, 8 * kSecond)), b(1, settings(1, 16 * kSecond));
  Relay relay(b.listen("tcp"));
  a.engine->set_peer({.identity = b.address().identity, .addresses = {relay.address()}});
  const auto check = [&](const std::vector<std::string>& at_a, const std::vector<std::string>& at_b) {
    while (watched(relay.address(), false).size() != at_a.size()) std::this_thread::yield();  // earlier ones close
    while (watched(b.address().addresses[0], true).size() != at_b.size()) std::this_thread::yield();
    CHECK(watched(relay.address(), false) == at_a);
    CHECK(watched(b.address().addresses[0], true) == at_b);
  };
  CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
  check({"5 5 3 23200"}, {"11 11 3 46400"});
  const std::string large(8 << 20, 'x');
  while (a.engine->stats().lanes < 1 || b.engine->stats().lanes < 1) a.call(1, {.segments = {large}});
  check({"5 5 3 0", "5 5 3 23200"}, {"11 11 3 0", "11 11 3 46400"});
  relay.reset();
  CHECK_EQ(body_of(a.call(1, {.body = "again", .timeout = 20 * kSecond})), "again");
  check({"5 5 3 23200"}, {"11 11 3 46400"});
  CHECK_EQ(a.event_count.value(), 0);
}

}  // namespace
}  // namespace telegrad::test

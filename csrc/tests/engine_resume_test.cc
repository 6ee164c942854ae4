// Sessions of engines that outlive their TCP connections.
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "base/crypto.h"
#include "core/left_out.h"
#include "tests/relay.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings resuming(int id, Nanos heartbeat = 2 * kSecond) {
  Settings s = Worker::settings_of(id);
  s.handshake.resume = true;
  s.heartbeat = heartbeat;
  return s;
}

/// Two workers, the first of which reaches the second through a relay. Counts how often each request runs.
struct Group {
  explicit Group(Nanos heartbeat = 2 * kSecond, const std::string& scheme = "tcp", Settings first = {}) {
    Settings s = resuming(0, heartbeat), t = resuming(1, heartbeat);
    if (first.handshake.me.id >= 0) s = std::move(first);
    if (scheme == "tls") s.security = t.security = security_for("tls:");
    a = std::make_unique<Worker>(0, s);
    b = std::make_unique<Worker>(1, t);
    relay = std::make_unique<Relay>(b->listen(scheme));
    a->engine->set_peer({.identity = b->address().identity, .addresses = {relay->address()}});
    for (Worker* w : {a.get(), b.get()}) {
      w->on_custom = [this, w](WorkItem& item) {
        if (item.message.header.flags & kLeftOut)
          return w->answer(item, std::string(item.message.body_view()), {}, kLeftOut);
        {
          std::lock_guard lock(mutex);
          ++runs[w->id][std::string(item.message.body_view())];
          order.emplace_back(item.message.body_view());
        }
        std::vector<std::string> segments;
        if (!item.message.body_view().starts_with("short")) {  // else only the request is large
          for (const auto& one : item.message.segments) segments.push_back(text_of(one));
        }
        w->answer(item, std::string(item.message.body_view()), std::move(segments));
      };
    }
    CHECK_EQ(body_of(call(*a, 1, "first")), "first");
  }

  Completion call(Worker& from, int to, std::string body, std::vector<std::string> segments = {}) {
    return from.call(
        to, {.tag = kCustom, .body = std::move(body), .segments = std::move(segments), .timeout = 20 * kSecond});
  }
  void check_each_ran_once() {
    std::lock_guard lock(mutex);
    for (const auto& of_worker : runs) {
      for (const auto& [body, count] : of_worker.second) CHECK_EQ(body + " " + std::to_string(count), body + " 1");
    }
  }
  void check_no_loss() {
    CHECK_EQ(a->event_count.value(), 0);
    CHECK_EQ(b->event_count.value(), 0);
  }

  std::mutex mutex;
  std::map<int, std::map<std::string, int>> runs;
  std::vector<std::string> order;  // the bodies in the order of their runs
  std::unique_ptr<Worker> a, b;
  std::unique_ptr<Relay> relay;
};

void break_in_many_calls(const std::string& scheme) {
  Group g(2 * kSecond, scheme);
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  std::atomic<int> calls = 0;
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&, t] {
      Worker& from = t < 2 ? *g.a : *g.b;
      for (int i = 0; !stop; ++i) {
        const std::string body = std::to_string(t) + "." + std::to_string(i);
        const Completion done = g.call(from, t < 2 ? 1 : 0, body, {std::string(i % 7 == 0 ? 20'000 : 10, 'x')});
        CHECK_EQ(body_of(done), body);
        ++calls;
      }
    });
  }
  for (int n = 0; n < times(30); ++n) {
    const int before = calls;
    while (calls < before + 20) std::this_thread::yield();
    g.relay->reset();
  }
  stop = true;
  for (std::thread& t : callers) t.join();
  g.check_each_ran_once();
  g.check_no_loss();
  CHECK(g.relay->accepted > 1);
}

CASE(resets_during_many_calls_cost_none) { break_in_many_calls("tcp"); }
CASE(resets_during_many_encrypted_calls_cost_none) {
  if (has_crypto()) break_in_many_calls("tls");
}

/// The connection breaks after each number of bytes of a call and its reply, and of the handshake that continues it.
CASE(a_break_at_any_byte_costs_nothing) {
  Group g;
  int n = 0;
  for (std::int64_t cut = 0; cut < 700; cut += sanitized() ? 23 : 7) {
    g.relay->left = cut;
    const std::string body = "call " + std::to_string(n++);
    CHECK_EQ(body_of(g.call(*g.a, 1, body)), body);
    g.relay->left = cut;  // of this, too
    const std::string back = "back " + std::to_string(n++);
    CHECK_EQ(body_of(g.call(*g.b, 0, back)), back);
  }
  g.check_each_ran_once();
  g.check_no_loss();
}

CASE(messages_wait_while_the_peer_is_out_of_reach) {
  Group g;
  g.relay->open = false;
  g.relay->reset();
  const int before = g.relay->accepted;
  while (g.relay->accepted < before + 2) std::this_thread::yield();  // it tries
  for (int i = 0; i < 20; ++i) g.a->start(1, i, {.tag = kCustom, .body = "later " + std::to_string(i)});
  for (int i = 20; i < 40; ++i) g.b->start(0, i, {.tag = kCustom, .body = "back " + std::to_string(i)});
  CHECK_EQ(g.a->completion_count.value(), 0);
  g.relay->open = true;
  g.a->completion_count.wait_for(20);
  g.b->completion_count.wait_for(20);
  g.check_each_ran_once();
  g.check_no_loss();
}

CASE(deadlines_run_while_a_session_is_suspended) {
  Group g;
  g.relay->open = false;
  g.relay->reset();
  const Completion done = g.a->call(1, {.tag = kCustom, .body = "late", .timeout = 50 * kMillisecond});
  CHECK(done.status == CallStatus::kTimedOut);
  g.relay->open = true;
  CHECK_EQ(body_of(g.call(*g.a, 1, "next")), "next");
  g.check_no_loss();
}

/// The connection looks intact, and passes nothing: as when a NAT has forgotten it.
CASE(a_silent_connection_is_replaced) {
  Group g(400 * kMillisecond);
  g.relay->frozen = true;
  std::thread heals([&] {
    const int before = g.relay->accepted;
    while (g.relay->accepted == before) std::this_thread::yield();
    g.relay->reset();  // only one end of the old one is notified, as the new one comes first
    g.relay->frozen = false;
  });
  CHECK_EQ(body_of(g.call(*g.a, 1, "x")), "x");
  heals.join();
  g.check_each_ran_once();
  g.check_no_loss();
}

CASE(a_peer_out_of_reach_is_lost_at_both_ends) {
  const Nanos heartbeat = 200 * kMillisecond;
  Group g(heartbeat);
  g.relay->open = false;
  const Nanos start = now();
  g.relay->reset();
  std::thread other([&] { CHECK(g.call(*g.b, 0, "y").status == CallStatus::kPeerLost); });
  const Completion lost = g.a->call(1, {.tag = kCustom, .body = "x"});  // without a deadline
  other.join();
  CHECK(lost.status == CallStatus::kPeerLost);
  CHECK_SAYS(lost.why, "could not be reached again");
  CHECK(now() - start >= heartbeat);
  for (Worker* w : {g.a.get(), g.b.get()}) {
    w->wait_for_event(EventKind::kPeerLost);
    CHECK_EQ(w->event_count.value(), 1);
  }
  g.relay->open = true;
  CHECK_EQ(body_of(g.call(*g.a, 1, "again")), "again");  // a new session
}

/// Large messages that are on their way lose their content if their memory may have changed, and run at most once.
CASE(a_large_message_runs_once_or_fails_alone) {
  Group g;
  Random random(1);
  int good = 0, failed = 0;
  for (int n = 0; n < times(40); ++n) {
    g.relay->left = static_cast<std::int64_t>(random.below(4 << 20));
    const std::string body = "large " + std::to_string(n), content = random.bytes(1 << 20);
    const Completion done = g.call(*g.a, 1, body, {content});
    CHECK(done.status == CallStatus::kReplied);
    if (done.reply.header.flags & kLeftOut) {
      CHECK(done.reply.body_view().starts_with(static_cast<char>(LeftOut::kBroken)));
      ++failed;
    } else {
      CHECK_EQ(body_of(done), body);
      CHECK(text_of(done.reply.segments[0]) == content);
      ++good;
    }
  }
  CHECK(good > 0);
  g.check_each_ran_once();
  g.check_no_loss();
}

/// A caller that waits does not change its tensor: it is sent again from the caller's memory.
CASE(a_large_request_of_a_waiting_caller_arrives) {
  Group g;
  Random random(2);
  for (int n = 0; n < times(40); ++n) {
    g.relay->left = static_cast<std::int64_t>(random.below(2 << 20));
    const std::string body = "short " + std::to_string(n);
    CHECK_EQ(body_of(g.call(*g.a, 1, body, {random.bytes(1 << 20)})), body);
  }
  while (Bytes::live > 0) std::this_thread::yield();  // none is kept once it has arrived
  g.check_each_ran_once();
  g.check_no_loss();
}

/// Small requests are sent between the parts of a large one that is sent again.
CASE(small_requests_do_not_wait_for_what_is_sent_again) {
  Group g;
  constexpr int kSmall = 20;
  const auto start = [&](int target, const std::string& body, const std::string& segment) {
    Request r{.tag = kCustom, .body = body, .never_wait = true};
    if (!segment.empty()) r.segments = {segment};
    g.a->start(1, target, std::move(r));
  };
  g.relay->frozen = true;
  start(0, "short large", std::string(64 << 20, 'x'));  // more than the sockets take
  for (int n = 1; n <= kSmall; ++n) start(n, "small " + std::to_string(n), "");
  g.relay->reset();
  g.relay->frozen = false;
  g.a->completion_count.wait_for(kSmall + 1);
  g.check_each_ran_once();
  g.check_no_loss();
  std::lock_guard lock(g.mutex);
  CHECK_EQ(g.order.size(), kSmall + 2u);  // with the call that has opened the session
  CHECK_EQ(g.order.back(), "short large");
}

/// The caller may change its tensor from then on, so nothing of it is kept.
CASE(a_caller_that_gives_up_gets_its_memory_back) {
  Group g(20 * kSecond);
  while (Bytes::live > 0) std::this_thread::yield();  // of the first call
  g.relay->frozen = true;
  const Completion done = g.a->call(
      1, {.tag = kCustom, .body = "given up", .segments = {std::string(70'000, 'x')}, .timeout = 100 * kMillisecond});
  CHECK(done.status == CallStatus::kTimedOut);
  CHECK_EQ(Bytes::live.load(), 0);
  g.relay->reset();
  g.relay->frozen = false;
  CHECK_EQ(body_of(g.call(*g.a, 1, "next")), "next");
  g.check_no_loss();
  std::lock_guard lock(g.mutex);
  CHECK_EQ(g.runs[1]["given up"], 0);
}

CASE(an_orderly_end_is_not_resumed) {
  Group g;
  const int before = g.relay->accepted;
  g.b->stop();
  CHECK_SAYS(g.a->wait_for_event(EventKind::kPeerLeft), "shut down");
  CHECK_EQ(g.relay->accepted.load(), before);
}

CASE(a_worker_stops_while_its_session_is_suspended) {
  Group g(400 * kMillisecond);
  g.relay->open = false;
  g.relay->reset();
  const int before = g.relay->accepted;
  while (g.relay->accepted == before) std::this_thread::yield();
  const Nanos start = now();
  g.a->stop(10 * kSecond);
  CHECK(now() - start < 5 * kSecond);
  CHECK(g.b->wait_for_event(EventKind::kPeerLost) != "");
}

/// If one end has ended the session, the other learns it from its first attempt.
CASE(a_session_that_has_ended_is_not_resumed) {
  Group g(30 * kSecond);
  g.relay->open = false;
  g.relay->reset();
  const int before = g.relay->accepted;
  while (g.relay->accepted == before) std::this_thread::yield();
  g.b->engine->remove_peer(0, "removed");
  g.relay->open = true;
  g.a->wait_for_event(EventKind::kPeerLost);
  CHECK_EQ(g.a->event_count.value(), 1);
}

/// A process that was replaced learns it from its attempt to continue its session, although it sends nothing.
CASE(an_attempt_of_an_older_process_is_refused) {
  Group g(30 * kSecond);
  Identity newer = g.a->address().identity;
  newer.incarnation += 1000;
  g.b->engine->set_peer({.identity = newer, .addresses = {}});  // closes the session
  g.a->wait_for_event(EventKind::kPeerLost);
  std::lock_guard lock(g.a->mutex);
  CHECK_EQ(g.a->events.size(), 2U);
  CHECK(g.a->events[0].event == EventKind::kReplaced);
  CHECK_SAYS(g.a->events[0].text, "another worker has taken the name w0");
}

CASE(a_worker_without_the_option_loses_the_session) {
  Settings off = resuming(0);
  off.handshake.resume = false;
  Group g(2 * kSecond, "tcp", off);
  const int before = g.relay->accepted;
  g.relay->reset();
  g.a->wait_for_event(EventKind::kPeerLost);
  g.b->wait_for_event(EventKind::kPeerLost);
  CHECK_EQ(g.relay->accepted.load(), before);
}

std::string read_text(int fd) {
  char buffer[100];
  const ssize_t n = ::read(fd, buffer, sizeof buffer);
  CHECK(n > 0);
  return {buffer, static_cast<std::size_t>(n)};
}

void write_text(int fd, const std::string& text) {
  CHECK_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

/// A process that is killed is lost at once, at the end that dialed and at the one that was dialed.
CASE(a_killed_process_on_this_host_is_lost_at_once) {
  for (const bool dials : {true, false}) {
    int up[2], down[2];
    CHECK_EQ(::pipe(up) + ::pipe(down), 0);
    const pid_t child = ::fork();  // before there are threads
    CHECK(child >= 0);
    if (child == 0) {
      const std::string other = read_text(down[0]);
      Worker b(1, resuming(1, 60 * kSecond));
      write_text(up[1], b.listen("tcp"));
      b.engine->set_peer({.identity = Worker::settings_of(0).handshake.me, .addresses = {other}});
      if (!dials) CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
      ::pause();
    }
    Worker a(0, resuming(0, 60 * kSecond));
    write_text(down[1], a.listen("tcp"));
    a.engine->set_peer({.identity = Worker::settings_of(1).handshake.me, .addresses = {read_text(up[0])}});
    if (dials) {
      CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    } else {
      a.link_count.wait_for(1);
    }
    a.start(1, 0, {.tag = kHold, .body = "held"});
    const Nanos killed = now();
    CHECK_EQ(::kill(child, SIGKILL), 0);
    a.completion_count.wait_for(1);
    CHECK(a.completions.at(0).status == CallStatus::kPeerLost);
    a.wait_for_event(EventKind::kPeerLost);
    CHECK(now() - killed < kSecond);
    CHECK_EQ(::waitpid(child, nullptr, 0), child);
    for (const int fd : {up[0], up[1], down[0], down[1]}) ::close(fd);
  }
}

}  // namespace
}  // namespace telegrad::test

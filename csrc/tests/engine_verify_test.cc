// Large results that are on their way when the connection breaks: their memory may have changed since.
#include "core/left_out.h"
#include "tests/relay.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// Two workers, the first of which reaches the second through a relay.
struct Pair {
  explicit Pair(Nanos heartbeat = 2 * kSecond) {
    for (const int id : {0, 1}) {
      Settings s = Worker::settings_of(id);
      s.handshake.resume = true;
      s.heartbeat = heartbeat;
      (id == 0 ? a : b) = std::make_unique<Worker>(id, s);
    }
    relay = std::make_unique<Relay>(b->listen("tcp"));
    a->engine->set_peer({.identity = b->address().identity, .addresses = {relay->address()}});
    CHECK_EQ(body_of(a->call(1, {.body = "first"})), "first");
  }
  void check_no_loss() {
    CHECK_EQ(a->event_count.value(), 0);
    CHECK_EQ(b->event_count.value(), 0);
  }

  std::unique_ptr<Worker> a, b;
  std::unique_ptr<Relay> relay;
};

/// Gets a large result of `b` that is on its way when the connection breaks. `unchanged`: answer of its owner.
Completion call_for_unverified(Pair& g, std::function<bool()> unchanged, const std::string& content) {
  g.b->on_custom = [&](WorkItem& item) {
    g.relay->freeze();
    Request r{.body = "result", .segments = {content}, .unchanged = unchanged};
    g.b->engine->reply(item.connection, item.message.header.call_id, compose(r), true);
    g.relay->reset();
    g.relay->frozen = false;
  };
  return g.a->call(1, {.tag = kCustom, .body = "call", .timeout = 20 * kSecond});
}

CASE(a_large_result_is_sent_again_if_its_memory_is_unchanged) {
  Pair g;
  Random random(3);
  const std::string content = random.bytes(100'000);
  for (const bool unchanged : {true, false}) {
    const Completion done = call_for_unverified(g, [unchanged] { return unchanged; }, content);
    CHECK_EQ((done.reply.header.flags & kLeftOut) != 0, !unchanged);
    if (unchanged) CHECK(text_of(done.reply.segments[0]) == content);
  }
  while (Bytes::live > 0) std::this_thread::yield();
  g.check_no_loss();
}

/// The thread that asks the owner waits for the GIL. The session does not wait for long, and goes on.
CASE(a_large_result_is_left_out_if_its_owner_does_not_answer) {
  Pair g(400 * kMillisecond);
  Event asked, answers;
  const Completion done = call_for_unverified(
      g,
      [&] {
        asked.set();
        answers.wait();
        return true;
      },
      std::string(100'000, 'x'));
  CHECK(done.reply.header.flags & kLeftOut);
  CHECK(done.reply.body_view().starts_with(static_cast<char>(LeftOut::kBroken)));
  asked.wait();
  CHECK_EQ(body_of(g.a->call(1, {.body = "next"})), "next");
  answers.set();
  while (Bytes::live > 0) std::this_thread::yield();
  g.check_no_loss();
}

}  // namespace
}  // namespace telegrad::test

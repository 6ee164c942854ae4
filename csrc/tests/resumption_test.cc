// When a session continues after a break. The two ends of a session are explored over a network that breaks at every
// step, loses the last frames of a handshake, delays attempts, and breaks one-sidedly.
#include "core/resumption.h"

#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "tests/check.h"
#include "transports/tcp/delivery.h"

namespace telegrad::test {
namespace {

struct Frame {
  enum Kind { kMessage, kConfirm, kWelcome, kRefuse } kind = kMessage;
  std::uint64_t value = 0;  // of a message: its content; of a handshake: `received`
  std::uint64_t attempt = 0;
};

/// A connection: frames in both directions. Either end may have noticed its end, or neither.
struct Wire {
  std::deque<Frame> to[2];
  bool broken = false;
};

struct Node {
  Resumption resumption;
  Received received;
  std::uint64_t base = 0, arrived = 0;  // of the present connection
  std::vector<std::uint64_t> got;
  std::uint64_t made = 0, next = 0;  // messages made, and the next one to put on the present connection
  int wire = 0;                      // -1: none
  int attempt = -1;                  // wire of the attempt under way
};

/// The dialing end is 0. Messages of an end are 0, 1, 2, ...; the sender keeps all of them.
class World {
 public:
  explicit World(Random& random) : random_(random) { wires_.emplace_back(); }

  void step() {
    switch (random_.below(8)) {
      case 0:
        return make(random_.below(2));
      case 1:
      case 2:
        return put(random_.below(2));
      case 3:
      case 4:
        return deliver(random_.below(2), random_.below(wires_.size()));
      case 5:
        wires_[random_.below(wires_.size())].broken = true;
        return;
      case 6:
        return notice(random_.below(2));
      default:
        return dial();
    }
  }

  void finish() {
    for (int i = 0; i < 1000; ++i) {
      notice(0);
      notice(1);
      dial();
      for (std::size_t w = 0; w < wires_.size(); ++w) {
        for (std::size_t n = 0; n < 2; ++n) deliver(n, w);
      }
      for (std::size_t n = 0; n < 2; ++n) put(n);
      if (nodes_[0].got.size() == nodes_[1].made && nodes_[1].got.size() == nodes_[0].made) break;
    }
    for (int n = 0; n < 2; ++n) {
      CHECK_EQ(nodes_[n].got.size(), nodes_[1 - n].made);
      for (std::uint64_t i = 0; i < nodes_[n].got.size(); ++i) CHECK_EQ(nodes_[n].got[i], i);
    }
  }

 private:
  void make(std::size_t n) {
    if (nodes_[n].made < 30) ++nodes_[n].made;
  }

  void put(std::size_t n) {
    Node& node = nodes_[n];
    if (node.wire < 0 || node.next == node.made) return;
    Wire& wire = wires_[static_cast<std::size_t>(node.wire)];
    if (!wire.broken) wire.to[1 - n].push_back({.kind = Frame::kMessage, .value = node.next});
    ++node.next;
  }

  void notice(std::size_t n) {
    Node& node = nodes_[n];
    if (node.wire >= 0 && wires_[static_cast<std::size_t>(node.wire)].broken) suspend(node);
    if (node.attempt >= 0 && wires_[static_cast<std::size_t>(node.attempt)].broken) node.attempt = -1;
  }

  static void suspend(Node& node) {
    if (!node.resumption.is_suspended()) node.resumption.suspend(node.next, false);
    node.wire = -1;
  }

  /// Also while the session seems intact, as when the peer is silent.
  void dial() {
    Node& node = nodes_[0];
    if (node.attempt >= 0 || (!node.resumption.is_suspended() && random_.below(4) != 0)) return;
    suspend(node);
    node.attempt = static_cast<int>(wires_.size());
    wires_.emplace_back();
    wires_.back().to[1].push_back(
        {.kind = Frame::kConfirm, .value = node.received.count(), .attempt = node.resumption.dial()});
  }

  void deliver(std::size_t n, std::size_t w) {
    Wire& wire = wires_[w];
    if (wire.to[n].empty()) return;
    const Frame frame = wire.to[n].front();
    wire.to[n].pop_front();
    if (wire.broken && random_.below(2) == 0) return wire.to[n].clear();  // the rest is lost
    Node& node = nodes_[n];
    switch (frame.kind) {
      case Frame::kMessage:
        if (node.wire == static_cast<int>(w) && node.received.add(node.base + node.arrived++, 1))
          node.got.push_back(frame.value);
        return;
      case Frame::kConfirm:
        if (!node.resumption.accept(frame.attempt)) return wire.to[0].push_back({.kind = Frame::kRefuse});
        suspend(node);
        resume(node, w, frame.value);
        return wire.to[0].push_front({.kind = Frame::kWelcome, .value = node.received.count()});
      case Frame::kWelcome:
        if (node.attempt != static_cast<int>(w)) return;
        node.attempt = -1;
        return resume(node, w, frame.value);
      case Frame::kRefuse:
        if (node.attempt == static_cast<int>(w)) node.attempt = -1;
        return;
    }
  }

  static void resume(Node& node, std::size_t w, std::uint64_t received) {
    node.wire = static_cast<int>(w);
    node.base = node.received.count();
    node.arrived = 0;
    node.next = received;
    node.resumption.resume();
  }

  Random& random_;
  std::vector<Wire> wires_;
  Node nodes_[2];
};

CASE(each_message_arrives_once_over_any_breaks) {
  for (int seed = 0; seed < times(20'000); ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    World world(random);
    for (std::uint64_t i = random.below(200); i > 0; --i) world.step();
    world.finish();
  }
}

CASE(an_attempt_that_is_not_newer_is_refused) {
  Resumption r;
  CHECK(r.accept(2));
  CHECK(!r.accept(2));
  CHECK(!r.accept(1));
  CHECK(r.accept(3));
}

CASE(attempts_have_growing_numbers) {
  Resumption r;
  CHECK_EQ(r.dial(), 1u);
  CHECK_EQ(r.dial(), 2u);
}

CASE(the_pause_grows_until_a_message_arrives) {
  Resumption r;
  r.suspend(5, true);
  CHECK_EQ(r.next_pause(4, 10), 0);
  CHECK_EQ(r.next_pause(4, 10), 4);
  CHECK_EQ(r.next_pause(4, 10), 8);
  CHECK_EQ(r.next_pause(4, 10), 10);
  r.resume();
  r.suspend(5, true);
  CHECK_EQ(r.next_pause(4, 10), 10);
  r.resume();
  r.suspend(6, true);
  CHECK_EQ(r.next_pause(4, 10), 0);
}

/// A message that breaks each connection does not do so for ever. A session without messages may break at any rate.
CASE(a_message_that_breaks_every_connection_ends_the_session) {
  Resumption r;
  int breaks = 0;
  while (r.suspend(5, true)) {
    r.resume();
    CHECK(++breaks < 100);
  }
  CHECK(breaks > 5);
  CHECK(r.suspend(6, true));
  for (int i = 0; i < 100; ++i) CHECK(r.suspend(6, false));
}

}  // namespace
}  // namespace telegrad::test

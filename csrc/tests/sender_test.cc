// The sender: order of the queues of a connection, flow control, and messages that wait for a connection.
#include "core/sender.h"

#include <utility>

#include "core/engine_parts.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

/// A link that records what is sent, and can be blocked.
class ScriptedLink final : public Link {
 public:
  int fd() const override { return -1; }
  SendState send(Outgoing& m) override {
    if (blocks) return SendState::kBlocked;
    sent.push_back(m.header);
    return SendState::kSent;
  }
  SendState send_between(Outgoing& m) override {
    sent.push_back(m.header);
    return SendState::kSent;
  }
  bool is_large(const Outgoing&) const override { return true; }
  ReceiveState receive(Inbox&, std::size_t) override { return ReceiveState::kIdle; }
  void set_limits(const Limits&) override {}
  void close() override {}
  std::uint64_t received_bytes() const override { return 0; }
  LinkError error() const override { return {}; }
  PeerCredentials peer_credentials(CredentialLookup&) const override { return {}; }
  std::string describe() const override { return "scripted"; }

  bool blocks = false;
  std::vector<FrameHeader> sent;
};

struct Sending {
  explicit Sending(std::int64_t window = 1 << 20) : parts(settings_of(window)) {
    auto owned = std::make_unique<ScriptedLink>();
    link = owned.get();
    c = std::make_shared<Connection>(99, std::move(owned), Handshake::accept(parts.settings.handshake), false);
    c->state = Connection::State::kOpen;
    c->max_in_flight = 8;
    c->max_in_flight_bytes = INT64_MAX;
  }
  static Settings settings_of(std::int64_t window) {
    Settings s;
    s.window = window;
    return s;
  }
  /// Sends a request; a large one has a segment.
  SendResult send(std::uint64_t id, bool large = false, FrameType type = FrameType::kRequest) {
    auto m = std::make_unique<Outgoing>();
    m->header.type = type;
    m->header.call_id = id;
    m->immutable = true;
    if (large) m->segments.push_back({.data = bytes, .size = sizeof bytes});
    return parts.sender.transmit(c, std::move(m));
  }
  std::vector<std::uint64_t> ids() const {
    std::vector<std::uint64_t> ids;
    for (const FrameHeader& h : link->sent) ids.push_back(h.call_id);
    return ids;
  }

  EngineParts parts;
  ScriptedLink* link;
  ConnectionPtr c;
  std::byte bytes[1000]{};
};

CASE(blocked_messages_are_sent_in_their_order) {
  Sending s;
  s.link->blocks = true;
  for (std::uint64_t id = 1; id <= 3; ++id) CHECK(s.send(id) == SendResult::kQueued);
  CHECK(s.link->sent.empty());
  CHECK(s.c->kept_bytes > 0);
  s.link->blocks = false;
  CHECK(s.send(4) == SendResult::kQueued);  // after those that wait
  s.parts.sender.flush(s.c);
  CHECK(s.ids() == (std::vector<std::uint64_t>{1, 2, 3, 4}));
  CHECK_EQ(s.c->kept_bytes.load(), 0);
  CHECK(s.send(5) == SendResult::kDone);
}

CASE(small_messages_overtake_a_large_one_and_its_successors) {
  Sending s;
  s.link->blocks = true;
  CHECK(s.send(1, true) == SendResult::kQueued);
  CHECK(s.c->large_unsent > 0);
  CHECK(s.send(2) == SendResult::kDone);
  CHECK(s.send(3, true) == SendResult::kQueued);
  CHECK(s.send(4) == SendResult::kDone);
  CHECK(s.send(1, false, FrameType::kCancel) == SendResult::kQueued);  // not before the request that it cancels
  s.link->blocks = false;
  s.parts.sender.flush(s.c);
  CHECK(s.ids() == (std::vector<std::uint64_t>{2, 4, 1, 3, 1}));
  CHECK_EQ(s.c->large_unsent.load(), 0);
}

CASE(nothing_is_sent_on_a_closed_connection) {
  Sending s;
  s.c->state = Connection::State::kClosed;
  CHECK(s.send(1) == SendResult::kBroken);
  CHECK(s.link->sent.empty());
}

CASE(half_the_window_takes_a_request_of_any_size) {
  Sending s(1000);
  CHECK(s.parts.sender.window_open(*s.c, 5000));
  s.c->outstanding = 500;
  CHECK(s.parts.sender.window_open(*s.c, 5000));
  s.c->outstanding = 501;
  CHECK(!s.parts.sender.window_open(*s.c, 500));
  CHECK(s.parts.sender.window_open(*s.c, 499));
  s.c->outstanding = 0;
  s.c->in_flight = 8;
  CHECK(!s.parts.sender.window_open(*s.c, 1));
}

CASE(credit_is_reported_at_a_part_of_the_window) {
  Sending s(1000);
  s.parts.sender.return_credit(s.c, 200);
  CHECK(s.link->sent.empty());
  s.parts.sender.return_credit(s.c, 60);
  CHECK_EQ(s.link->sent.size(), 1u);
  CHECK(s.link->sent[0].type == FrameType::kCredit);
  CHECK_EQ(s.link->sent[0].credit, 260u);
  s.parts.sender.return_credit(s.c, 100);
  CHECK(s.send(1) == SendResult::kDone);
  CHECK_EQ(s.link->sent[1].credit, 100u);  // with the next message
}

CASE(waiting_messages_are_counted_until_they_are_taken) {
  PendingMessages pending;
  for (std::uint64_t id = 1; id <= 4; ++id) {
    auto m = std::make_unique<Outgoing>();
    m->header.call_id = id;
    m->admitted = id % 2 == 0;
    pending.add({.message = std::move(m), .until = kNever});
  }
  CHECK_EQ(pending.kept_bytes(), 4 * weight(0));
  CHECK_EQ(pending.forced(), 2u);
  const auto taken = pending.take_if([](PendingMessage& m) { return m.message->header.call_id % 2 == 1; });
  CHECK_EQ(taken.size(), 2u);
  CHECK_EQ(taken[0].message->header.call_id, 1u);
  CHECK_EQ(taken[1].message->header.call_id, 3u);
  CHECK_EQ(pending.size(), 2u);
  CHECK_EQ(pending.kept_bytes(), 2 * weight(0));
  CHECK_EQ(pending.forced(), 0u);
  CHECK_EQ(pending.forced_bytes(), 0);
  CHECK_EQ(pending.take().front().message->header.call_id, 2u);
  CHECK_EQ(pending.kept_bytes(), 0);
}

}  // namespace
}  // namespace telegrad::test

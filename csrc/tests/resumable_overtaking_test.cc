// Links that outlive their connections, while small messages overtake large ones.
#include "tests/resumable_pair.h"

namespace telegrad::test {
namespace {

CASE(breaks_deliver_messages_that_overtake_others_once) {
  const auto fill = [](Pair& p) {
    Random random(11);
    for (End& e : p.ends) {
      for (std::uint64_t n = 0; n < 9; ++n) {
        Message m = n % 4 == 1 ? random_message(random, 3, {700, 20, 300}, 2) : random_message(random, 5, {20}, 2);
        m.header.type = FrameType::kRequest;
        m.header.call_id = n;
        e.add(std::move(m));
      }
    }
  };
  std::int64_t all = 0;
  {
    Pair p(kWhole, true);
    fill(p);
    p.run();
    const auto& got = p.ends[0].inbox.messages;
    CHECK(got[1].header.call_id != 1);  // others have overtaken the large one
    p.check_each_once();
    all = kWhole - *p.budgets[0];
  }
  Random random(12);
  for (std::int64_t cut = 0; cut <= all; cut += 1 + all / times(1000)) {
    Pair p(cut, true);
    fill(p);
    p.run();
    if (!p.is_done()) p.resume(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(all))));
    p.run();
    if (!p.is_done()) p.resume(kWhole);
    p.run();
    p.check_each_once();
  }
}

/// A large message takes long; the acknowledgements of the other direction go between its parts.
CASE(acknowledgements_overtake_a_large_message) {
  Random random(13);
  Pair p(kWhole, true);
  Message large = random_message(random, 3, {200'000});
  large.header.type = FrameType::kRequest;
  p.ends[0].add(std::move(large));
  for (std::uint64_t n = 0; n < 2 * kMessagesPerAck; ++n) {
    Message m = random_message(random, 5);
    m.header.call_id = n;
    p.ends[1].add(std::move(m));
  }
  while (p.ends[1].link->waiting().first == 0) {
    for (End& e : p.ends) e.step();
    CHECK_EQ(p.ends[0].sent, 0u);  // the large message is still being sent
  }
  p.run();
  p.check_each_once();
}

/// A lane breaks alone in the middle of a large message: what follows must not arrive as its rest.
CASE(a_broken_lane_loses_no_message) {
  Random random(14);
  Pair p;
  auto lanes = p.connect(kWhole);
  const int lane = lanes[0]->fd();
  for (int i = 0; i < 2; ++i) CHECK(p.ends[i].link->add_lane(std::move(lanes[i])));
  Message large = random_message(random, 3, {24 << 20});
  large.header.call_id = 1;
  Outgoing first = large.outgoing();
  for (int turn = 0; turn < 3; ++turn) {
    CHECK(p.ends[0].link->send(first) == SendState::kBlocked);
    p.ends[1].link->poll_lanes();
    CHECK(p.ends[1].link->receive(p.ends[1].inbox, kAnyBudget) != ReceiveState::kBroken);
  }
  ::shutdown(lane, SHUT_RDWR);
  std::vector<Message> small(2);
  for (std::uint64_t n = 0; n < small.size(); ++n) small[n].header.call_id = 2 + n;
  Outgoing second = small[0].outgoing(), third = small[1].outgoing();
  for (int turn = 0; turn < 3; ++turn) CHECK(p.ends[0].link->send(first) == SendState::kBlocked);
  CHECK(p.ends[0].link->send_between(second) == SendState::kBlocked);
  CHECK(!p.ends[0].link->waits_for_fd());
  p.ends[1].link->poll_lanes();
  p.ends[1].link->receive(p.ends[1].inbox, kAnyBudget);
  CHECK(p.ends[1].inbox.messages.empty());
  p.resume(kWhole);
  bool is_sent[3] = {};
  for (int turn = 0; p.ends[1].inbox.messages.size() < 3; ++turn) {
    CHECK(turn < 10'000);
    p.ends[0].link->flush();
    is_sent[1] = is_sent[1] || p.ends[0].link->send_between(second) == SendState::kSent;
    if (is_sent[1]) is_sent[0] = is_sent[0] || p.ends[0].link->send(first) == SendState::kSent;
    if (is_sent[0]) is_sent[2] = is_sent[2] || p.ends[0].link->send(third) == SendState::kSent;
    p.ends[1].link->receive(p.ends[1].inbox, kAnyBudget);
  }
  p.ends[0].add(std::move(large));
  for (Message& m : small) p.ends[0].add(std::move(m));
  p.check_each_once();
}

/// Sends small messages between the parts of a large one until there is no room for more, to an end that reads them.
std::size_t fill_between(Pair& p, Outgoing& large, const Message& small) {
  End& a = p.ends[0];
  End& b = p.ends[1];
  CHECK(a.link->send(large) == SendState::kBlocked);
  std::size_t sent = 0;
  for (; a.link->takes_between(); ++sent) {
    CHECK(sent < 1000);
    Outgoing out = small.outgoing();
    while (a.link->send_between(out) == SendState::kBlocked) b.link->receive(b.inbox, kAnyBudget);
  }
  while (b.inbox.messages.size() < sent) CHECK(b.link->receive(b.inbox, kAnyBudget) != ReceiveState::kBroken);
  return sent;
}

/// Without acknowledgements there is no room for more small messages, but the large one is completed.
CASE(a_large_message_does_not_wait_for_acknowledgements) {
  Random random(15);
  Pair p;
  End& a = p.ends[0];
  End& b = p.ends[1];
  const Message large = random_message(random, 3, {8 << 20}), small = random_message(random, kMaxCopied - 100);
  Outgoing first = large.outgoing();
  const std::size_t sent = fill_between(p, first, small);
  CHECK(sent >= kMaxUnacknowledged / kMaxCopied);
  Outgoing more = small.outgoing();
  CHECK(a.link->send_between(more) == SendState::kBlocked);
  CHECK(!a.link->waits_for_fd());
  while (a.link->send(first) == SendState::kBlocked) b.link->receive(b.inbox, kAnyBudget);
  while (b.inbox.messages.size() <= sent) b.link->receive(b.inbox, kAnyBudget);
  check_same(large, b.inbox.messages.back());
  CHECK(!a.link->takes_between());
  CHECK(b.link->flush() == SendState::kSent);
  CHECK(a.link->receive(a.inbox, kAnyBudget) == ReceiveState::kToSend);
  CHECK(a.link->takes_between());
}

/// The acknowledgements of messages that have overtaken a large one may be lost; the handshake states only a count.
CASE(what_has_overtaken_is_acknowledged_after_a_break) {
  Random random(16);
  Pair p;
  const Message large = random_message(random, 3, {8 << 20}), small = random_message(random, kMaxCopied - 100);
  Outgoing first = large.outgoing();
  fill_between(p, first, small);
  p.resume(kWhole);
  CHECK(!p.ends[0].link->takes_between());
  CHECK(p.ends[1].link->flush() == SendState::kSent);
  CHECK(p.ends[0].link->receive(p.ends[0].inbox, kAnyBudget) == ReceiveState::kToSend);
  CHECK(p.ends[0].link->takes_between());
}

/// The messages that were begun belong to a queue, which is cleared after `close`.
CASE(a_closed_link_uses_no_message) {
  Random random(17);
  Pair p;
  const Message large = random_message(random, 3, {8 << 20});
  auto first = std::make_unique<Outgoing>(large.outgoing());
  for (int turn = 0; turn < 3; ++turn) CHECK(p.ends[0].link->send(*first) == SendState::kBlocked);
  for (std::uint64_t n = 0; n < 2 * kMessagesPerAck; ++n) p.ends[1].add(random_message(random, 5));
  p.ends[1].step();
  CHECK(p.ends[0].link->receive(p.ends[0].inbox, kAnyBudget) == ReceiveState::kToSend);
  p.ends[0].link->close();
  first.reset();
  CHECK(p.ends[0].link->flush() == SendState::kBroken);
}

}  // namespace
}  // namespace telegrad::test

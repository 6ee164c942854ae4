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

/// Sends a large message whole, and breaks the connection before its end has been read.
Message send_and_break(Pair& p, FrameType type) {
  Random random(18);
  Message large = random_message(random, 3, {8 << 20});
  large.header.type = type;
  large.header.call_id = 1;
  Outgoing out = large.outgoing();
  out.owner = std::make_unique<KeepAlive>();  // of the memory, which does not change
  out.immutable = true;
  while (p.ends[0].link->send(out) == SendState::kBlocked) p.ends[1].link->receive(p.ends[1].inbox, kAnyBudget);
  CHECK(p.ends[1].inbox.messages.empty());
  p.resume(kWhole);
  return large;
}

void complete(Pair& p, std::size_t messages) {
  for (int turn = 0; p.ends[1].inbox.messages.size() < messages; ++turn) {
    CHECK(turn < 10'000);
    CHECK(p.ends[0].link->flush() != SendState::kBroken);
    p.ends[1].link->receive(p.ends[1].inbox, kAnyBudget);
  }
}

/// A small message is sent between the parts of a large one that is sent again.
CASE(small_messages_overtake_what_is_sent_again) {
  Pair p;
  End& a = p.ends[0];
  End& b = p.ends[1];
  const Message large = send_and_break(p, FrameType::kRequest);
  CHECK(a.link->flush() == SendState::kSent);
  CHECK(a.link->sends_again());
  CHECK(a.link->waits_for_fd());
  Random random(19);
  std::vector<Message> small;
  for (std::uint64_t n = 0; n < 10; ++n) {
    small.push_back(random_message(random, 20, {60'000}));
    small.back().header.type = FrameType::kReply;
    small.back().header.call_id = 2 + n;
    Outgoing out = small.back().outgoing();
    CHECK(!a.link->buffer(out));
    while (a.link->send(out) == SendState::kBlocked) {
      CHECK(a.link->flush() != SendState::kBroken);  // as when the link is writable
      b.link->receive(b.inbox, kAnyBudget);
    }
  }
  while (b.inbox.messages.size() < small.size()) b.link->receive(b.inbox, kAnyBudget);
  CHECK(a.link->sends_again());
  complete(p, small.size() + 1);
  CHECK(!a.link->sends_again());
  for (std::size_t n = 0; n < small.size(); ++n) check_same(small[n], b.inbox.messages[n]);
  check_same(large, b.inbox.messages.back());
}

/// The acknowledgement of what arrives meanwhile overtakes, too.
CASE(acknowledgements_overtake_what_is_sent_again) {
  Pair p;
  End& a = p.ends[0];
  End& b = p.ends[1];
  const Message large = send_and_break(p, FrameType::kRequest);
  CHECK(a.link->flush() == SendState::kSent);
  Random random(23);
  for (std::uint64_t n = 0; n < kMessagesPerAck; ++n) b.add(random_message(random, 5));
  b.step();
  for (int turn = 0; b.link->waiting().any; ++turn) {
    CHECK(turn < 1000);
    b.step();
    a.link->receive(a.inbox, kAnyBudget);
    CHECK(a.link->flush() != SendState::kBroken);
  }
  CHECK(a.link->sends_again());
  complete(p, 1);
  check_same(large, b.inbox.messages[0]);
}

/// Large messages are sent again one after the other; the last of them was still being sent.
CASE(large_messages_are_sent_again_one_by_one) {
  for (const bool last_is_sent : {true, false}) {
    Pair p(kWhole, true);
    End& a = p.ends[0];
    Random random(24);
    for (std::uint64_t n = 0; n < 5; ++n) {
      const std::vector<std::size_t> large{700};
      a.add(random_message(random, 5, n == 3 ? std::vector<std::size_t>() : large));
      a.to_send.back().header.call_id = n;
      a.sending.push_back(std::make_unique<Outgoing>(a.to_send.back().outgoing()));
      for (int turn = 0; turn < 1000 && a.link->send(*a.sending[n]) == SendState::kBlocked; ++turn) {
        if (n == 4 && turn == 3 && !last_is_sent) break;
      }
    }
    a.sent = last_is_sent ? 5 : 4;
    p.resume(kWhole);
    p.run();
    p.check_each_once();
  }
}

/// The next connection breaks within the frame of the large message, or within its fragments.
CASE(what_is_sent_again_begins_again_after_another_break) {
  for (std::int64_t cut = 0; cut < 1200; cut += 10) {
    Pair p(kWhole, true);
    End& a = p.ends[0];
    Random random(25);
    a.add(random_message(random, 300, {700}));
    Outgoing out = a.to_send[0].outgoing();
    while (a.link->send(out) == SendState::kBlocked) {
    }
    p.resume(cut);
    for (int turn = 0; turn < 100; ++turn) a.link->flush();
    p.resume(kWhole);
    complete(p, 1);
    p.check();
  }
}

/// By the order rules, these wait for the large message.
CASE(some_messages_do_not_overtake_what_is_sent_again) {
  for (const auto& [type, later] :
       {std::pair{FrameType::kOneway, FrameType::kOneway}, std::pair{FrameType::kRequest, FrameType::kCancel},
        std::pair{FrameType::kRequest, FrameType::kGoodbye}, std::pair{FrameType::kRequest, FrameType::kRequest}}) {
    Pair p;
    End& a = p.ends[0];
    End& b = p.ends[1];
    const Message large = send_and_break(p, type);
    Random random(20);
    Message second = random_message(random, 3, {std::uint64_t{later == FrameType::kRequest ? 2u << 20 : 0u}});
    second.header.type = later;
    second.header.call_id = 1;
    Outgoing out = second.outgoing();
    for (int turn = 0; a.link->send(out) == SendState::kBlocked; ++turn) {
      CHECK(turn < 10'000);
      b.link->receive(b.inbox, kAnyBudget);
    }
    CHECK(!a.link->sends_again());
    complete(p, 2);
    check_same(large, b.inbox.messages[0]);
    check_same(second, b.inbox.messages[1]);
  }
}

/// The connection breaks while small messages are sent between the parts of a large one that is sent again.
CASE(breaks_during_that_deliver_each_message_once) {
  const auto fill = [](Pair& p) {
    Random random(21);
    for (End& e : p.ends) {
      for (std::uint64_t n = 0; n < 12; ++n) {
        Message m = n % 6 == 0 ? random_message(random, 200, {2000}, 2) : random_message(random, 5, {20}, 2);
        m.header.type = n % 4 == 3 ? FrameType::kOneway : FrameType::kRequest;
        m.header.call_id = n;
        e.add(std::move(m));
      }
    }
  };
  Random random(22);
  for (int round = 0; round < times(300); ++round) {
    Pair p(static_cast<std::int64_t>(random.below(9000)), true);
    fill(p);
    for (int breaks = 0; !p.is_done(); ++breaks) {
      CHECK(breaks < 100);
      p.run();
      if (!p.is_done()) p.resume(static_cast<std::int64_t>(random.below(breaks < 10 ? 4000 : 1 << 20)));
    }
    p.check_each_once();
  }
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

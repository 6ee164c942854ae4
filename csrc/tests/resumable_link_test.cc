// Links that outlive their connections: each message is delivered once, wherever the connection breaks.
#include "core/left_out.h"
#include "tests/resumable_pair.h"

namespace telegrad::test {
namespace {

void fill(Pair& p, std::uint64_t seed) {
  Random random(seed);
  for (int n = 0; n < 4; ++n) p.ends[0].add(random_message(random, 5, {20, 0, 3}, 4));
  for (int n = 0; n < 3; ++n) p.ends[1].add(random_message(random, 30, {}));
  p.ends[0].add(random_message(random, 0, {1500}));  // not sent in one piece
}

CASE(a_break_at_every_byte_delivers_each_message_once) {
  std::int64_t all = 0;
  {
    Pair p;
    fill(p, 1);
    p.run();
    p.check();
    all = kWhole - *p.budgets[0];
  }
  CHECK(all > 1500);
  for (std::int64_t cut = 0; cut <= all; ++cut) {
    Pair p(cut);
    fill(p, 1);
    p.run();
    CHECK(cut == all || !p.is_done());
    p.resume(kWhole);
    p.run();
    p.check();
  }
}

/// Small messages overtake large ones in both directions, and the connection breaks at many places, twice.
/// Connections break again and again, also while messages are sent again, and during the handshake.
CASE(many_breaks_deliver_each_message_once) {
  Random random(7);
  for (int round = 0; round < times(200); ++round) {
    Pair p(static_cast<std::int64_t>(random.below(1000)));
    fill(p, random.next());
    fill(p, random.next());
    int breaks = 0;
    for (; !p.is_done(); ++breaks) {
      CHECK(breaks < 100);
      p.run();
      if (!p.is_done()) p.resume(static_cast<std::int64_t>(random.below(breaks < 20 ? 900 : 1 << 20)));
    }
    p.check();
  }
}

/// A message that was being sent may get a copy of its content meanwhile.
CASE(a_large_message_in_progress_is_sent_from_its_beginning) {
  Random random(3);
  Pair p(3 << 20);
  p.ends[0].add(random_message(random, 8, {5 << 20, 1 << 20}));
  p.run();
  CHECK(!p.is_done());
  CHECK_EQ(p.ends[0].sent, 0u);
  Outgoing& m = *p.ends[0].sending[0];
  CHECK(m.sent > 0);
  copy_payload(m);
  p.resume(kWhole);
  p.run();
  p.check();
}

/// Its last byte arrived, but the connection broke before the sender knew.
CASE(a_message_that_has_arrived_is_not_sent_again) {
  Random random(3);
  Pair p(3 << 20);
  p.ends[0].add(random_message(random, 8, {5 << 20}));
  p.run();
  CHECK(p.ends[0].sending[0]->sent > 0);
  p.ends[0].link->suspend();
  auto links = p.connect(0);  // nothing can be sent
  CHECK(p.ends[0].link->resume(*links[0], 1));
  CHECK(p.ends[0].link->send(*p.ends[0].sending[0]) == SendState::kSent);
  CHECK_EQ(p.ends[0].link->waiting().first, 1u);
  CHECK(!p.ends[0].link->waiting().any);
}

struct Answers final : KeepAlive {
  bool is_unchanged() const override { return answer(); }
  std::function<bool()> answer;
};

/// A reply with an owner that answers whether its memory has changed, between two small messages. None arrives before
/// the connection breaks.
struct Unverified {
  explicit Unverified(std::function<bool()> answer) {
    Random random(17);
    sent[0] = random_message(random, 8);
    sent[1] = random_message(random, 8, {100'000});
    sent[2] = random_message(random, 8);
    for (Message& m : sent) {
      m.header = {.type = FrameType::kReply, .call_id = m.header.call_id};
      Outgoing out = m.outgoing();
      if (&m == &sent[1]) {
        auto owner = std::make_unique<Answers>();
        owner->answer = std::move(answer);
        out.verifiable = true;
        out.owner = std::move(owner);
      }
      CHECK(a.link->send(out) == SendState::kSent);
    }
    p.resume(kWhole);
  }
  /// Exchanges what can be sent; returns how many messages have arrived.
  std::size_t exchange() {
    a.link->flush();
    b.link->receive(b.inbox, kAnyBudget);
    b.link->flush();
    a.link->receive(a.inbox, kAnyBudget);
    return b.inbox.messages.size();
  }

  Pair p;
  End& a = p.ends[0];
  End& b = p.ends[1];
  std::array<Message, 3> sent;
};

CASE(a_message_is_sent_again_once_it_is_verified) {
  std::string* memory = nullptr;
  Unverified u([&] {
    memory->assign(memory->size(), 'z');  // it may change from now on
    return true;
  });
  memory = &u.sent[1].segments[0];
  const std::string original = *memory;
  CHECK(u.a.link->has_unverified());
  CHECK_EQ(u.exchange(), 1u);  // those behind it wait
  CHECK(!u.a.link->sends_again() && u.p.ends[0].link->flush() == SendState::kSent);
  u.a.link->verify();
  CHECK(!u.a.link->has_unverified());
  CHECK_EQ(u.exchange(), 3u);
  CHECK(std::string_view(reinterpret_cast<const char*>(u.b.inbox.messages[1].segments[0]->data()), 100'000) ==
        original);
  check_same(u.sent[2], u.b.inbox.messages[2]);
}

CASE(a_changed_message_is_sent_again_without_content) {
  Unverified u([] { return false; });
  u.a.link->verify();
  CHECK_EQ(u.exchange(), 3u);
  CHECK(u.b.inbox.messages[1].header.flags & kLeftOut);
  check_same(u.sent[2], u.b.inbox.messages[2]);
}

CASE(a_message_that_is_not_verified_in_time_is_sent_again_without_content) {
  Unverified u([] { return true; });
  Outgoing next = u.sent[0].outgoing();
  CHECK(u.a.link->send(next) == SendState::kBlocked);
  CHECK(!u.a.link->waits_for_fd());  // but for the check
  CHECK(!u.a.link->give_up_verifying());
  CHECK_EQ(u.exchange(), 3u);
  CHECK(u.b.inbox.messages[1].header.flags & kLeftOut);
  u.a.link->verify();  // nothing is left to verify
  CHECK(u.a.link->send(next) == SendState::kSent);
  CHECK_EQ(u.exchange(), 4u);
}

/// Meanwhile, acknowledgements are sent, and a further break changes nothing.
CASE(acknowledgements_do_not_wait_for_a_check) {
  Unverified u([] { return true; });
  Random random(18);
  for (std::uint64_t n = 0; n < kMessagesPerAck; ++n) {
    const Message sent = random_message(random, 8);
    Outgoing m = sent.outgoing();
    CHECK(u.b.link->send(m) == SendState::kSent);
  }
  for (int n = 0; n < 3; ++n) CHECK_EQ(u.exchange(), 1u);
  CHECK(u.a.link->receive(u.a.inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK_EQ(u.a.inbox.messages.size(), kMessagesPerAck);
  CHECK_EQ(u.b.link->waiting().first, kMessagesPerAck);
  u.p.resume(kWhole);
  CHECK_EQ(u.exchange(), 1u);
  u.a.link->verify();
  CHECK_EQ(u.exchange(), 3u);
  check_same(u.sent[1], u.b.inbox.messages[1]);
}

CASE(a_suspended_link_blocks_and_receives_nothing) {
  Pair p;
  Random random(4);
  p.ends[0].add(random_message(random, 8));
  p.ends[1].add(random_message(random, 8));
  p.ends[1].step();  // it is on its way to the other end
  p.ends[0].link->suspend();
  Outgoing m = p.ends[0].to_send[0].outgoing();
  CHECK(p.ends[0].link->send(m) == SendState::kBlocked);
  CHECK(!p.ends[0].link->waits_for_fd());
  CHECK(!p.ends[0].link->buffer(m));
  CHECK(p.ends[0].link->receive(p.ends[0].inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK(p.ends[0].inbox.messages.empty());
  p.ends[0].link->close();
  CHECK(p.ends[0].link->send(m) == SendState::kBroken);
}

/// An end that does not acknowledge blocks the other one, and its acknowledgement unblocks it.
CASE(unacknowledged_copies_are_bounded) {
  Pair p;
  Random random(5);
  const Message m = random_message(random, kMaxCopied - 100);
  End& a = p.ends[0];
  End& b = p.ends[1];
  std::size_t sent = 0;
  while (true) {
    Outgoing out = m.outgoing();
    SendState state;
    while ((state = a.link->send(out)) == SendState::kBlocked && a.link->waits_for_fd()) {
      CHECK(b.link->receive(b.inbox, kAnyBudget) != ReceiveState::kBroken);  // it reads, and sends nothing
    }
    if (state == SendState::kBlocked) break;
    CHECK(state == SendState::kSent);
    ++sent;
    CHECK(sent < 1000);
  }
  CHECK(sent >= kMaxUnacknowledged / kMaxCopied);
  while (b.inbox.messages.size() < sent) b.link->receive(b.inbox, kAnyBudget);
  CHECK(b.link->flush() == SendState::kSent);
  CHECK(a.link->receive(a.inbox, kAnyBudget) == ReceiveState::kToSend);
  Outgoing out = m.outgoing();
  CHECK(a.link->send(out) != SendState::kBroken);
  CHECK(a.inbox.messages.empty());  // acknowledgements are not delivered
}

/// Frames that arrive together with the welcome belong to the continued link.
CASE(what_arrives_with_the_end_of_the_handshake_is_delivered) {
  Pair p;
  Random random(6);
  auto links = p.connect(kWhole);
  p.ends[0].add(random_message(random, 9));
  const std::uint64_t a = p.ends[0].link->suspend(), b = p.ends[1].link->suspend();
  Message welcome;
  welcome.header.type = FrameType::kWelcome;
  Outgoing w = welcome.outgoing();
  CHECK(links[0]->send(w) == SendState::kSent);
  CHECK(p.ends[0].link->resume(*links[0], b));
  CHECK(p.ends[0].step());
  struct Opens final : Inbox {
    BlockPtr allocate(std::size_t size) override { return inner.allocate(size); }
    void deliver(Incoming&& m) override {
      CHECK(m.header.type == FrameType::kWelcome);
      open();
    }
    std::function<void()> open;
    RecordingInbox inner;
  } opens;
  opens.open = [&] { CHECK(p.ends[1].link->resume(*links[1], a)); };
  CHECK(links[1]->receive(opens, kAnyBudget) != ReceiveState::kBroken);
  p.ends[1].step();
  p.check();
}

CASE(a_false_acknowledgement_ends_the_link) {
  for (const std::uint64_t count : {std::uint64_t{1}, UINT64_MAX}) {
    Pair p;
    End& a = p.ends[0];
    CHECK(a.link->may_resume());
    FrameHeader ack;
    ack.type = FrameType::kAck;
    ack.call_id = count;
    CHECK_EQ(::send(p.ends[1].link->fd(), &ack, sizeof ack, 0), static_cast<ssize_t>(sizeof ack));
    CHECK(a.link->receive(a.inbox, kAnyBudget) == ReceiveState::kBroken);
    CHECK_SAYS(a.link->error().text, "never sent");
    CHECK_EQ(a.link->error().code, EPROTO);
    CHECK(!a.link->may_resume());
  }
}

CASE(a_malformed_frame_ends_the_link) {
  Pair p;
  End& a = p.ends[0];
  const std::string garbage(100, 'x');
  CHECK_EQ(::send(p.ends[1].link->fd(), garbage.data(), garbage.size(), 0), 100);
  CHECK(a.link->receive(a.inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK(!a.link->may_resume());
}

/// A peer that has lost its count, or states a wrong one, cannot continue.
CASE(a_false_count_does_not_resume) {
  Pair p;
  Random random(8);
  for (std::uint64_t n = 0; n < kMessagesPerAck; ++n) p.ends[0].add(random_message(random, 1));
  p.run();
  p.ends[0].step();  // the acknowledgement
  for (const std::uint64_t count : {std::uint64_t{0}, kMessagesPerAck - 1, kMessagesPerAck + 1}) {
    auto links = p.connect(kWhole);
    p.ends[0].link->suspend();
    CHECK(!p.ends[0].link->resume(*links[0], count));
  }
  auto links = p.connect(kWhole);
  CHECK(p.ends[0].link->resume(*links[0], kMessagesPerAck));
}

/// A second connection would continue in the middle of what the first one sends.
CASE(a_link_that_is_not_suspended_does_not_resume) {
  Random random(10);
  Pair p(1000);
  p.ends[0].add(random_message(random, 8, {5000}));
  p.run();
  p.resume(2000);  // another part of the message
  p.ends[0].step();
  const std::uint64_t sent = p.ends[0].sending[0]->sent;
  CHECK(sent > 0);
  auto links = p.connect(kWhole);
  CHECK(!p.ends[0].link->resume(*links[0], 0));
  CHECK_EQ(p.ends[0].sending[0]->sent, sent);
  p.resume(kWhole);
  p.run();
  p.check();
}

CASE(a_link_that_does_not_keep_passes_everything_on) {
  Pair p;
  auto links = p.connect(kWhole);
  CHECK(!links[0]->may_resume());
  Random random(9);
  const Message m = random_message(random, 3);
  Outgoing out = m.outgoing();
  CHECK(links[0]->send(out) == SendState::kSent);
  RecordingInbox inbox;
  receive_until(*links[1], inbox, 1);
  links[1]->close();
  receive_until_broken(*links[0], inbox);
  CHECK(links[0]->send(out) == SendState::kBroken);
}

}  // namespace
}  // namespace telegrad::test

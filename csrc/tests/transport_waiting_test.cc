// Conformance suite of the transport contract (core/transport.h): full links, read budgets and busy polling.
#include <thread>

#include "tests/transport_suite.h"

namespace telegrad::test {
namespace {

// ---- blocking

void blocks_and_resumes(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  // So large that the rest of the last one fits nowhere: a socket accepts a little more than its buffer size.
  Clogged c = clog(*e.a, 12 * kMiB);
  Outgoing& last = *c.sent.back();
  CHECK(e.a->send(last) == SendState::kBlocked);
  CHECK(!writable(*e.a, 0));
  SendState state = SendState::kBlocked;
  while (state == SendState::kBlocked) {
    wait_for_either(*e.a, *e.b);
    RecordingInbox nothing;
    if (readable(*e.a, 0)) CHECK(receive(*e.a, nothing, kAnyBudget) != ReceiveState::kBroken);
    if (readable(*e.b, 0)) CHECK(receive(*e.b, inbox, 64 * kKiB) != ReceiveState::kBroken);
    if (writable(*e.a, 0) || !e.a->waits_for_fd()) state = e.a->send(last);
  }
  CHECK(state == SendState::kSent);
  receive_until(*e.b, inbox, c.messages.size());
  for (std::size_t i = 0; i < c.messages.size(); ++i) check_same(c.messages[i], inbox.messages[i]);
}

void both_ends_full_at_once(Scheme scheme) {
  Ends e(scheme);
  Clogged from_a = clog(*e.a, kMiB);
  Clogged from_b = clog(*e.b, kMiB);
  RecordingInbox at_a, at_b;
  bool a_done = false, b_done = false;
  while (!a_done || !b_done || at_b.messages.size() < from_a.messages.size() ||
         at_a.messages.size() < from_b.messages.size()) {
    if (readable(*e.a, 0)) receive(*e.a, at_a, kAnyBudget);
    if (readable(*e.b, 0)) receive(*e.b, at_b, kAnyBudget);
    if (!a_done && writable(*e.a, 0)) a_done = e.a->send(*from_a.sent.back()) == SendState::kSent;
    if (!b_done && writable(*e.b, 0)) b_done = e.b->send(*from_b.sent.back()) == SendState::kSent;
  }
  for (std::size_t i = 0; i < from_a.messages.size(); ++i) check_same(from_a.messages[i], at_b.messages[i]);
  for (std::size_t i = 0; i < from_b.messages.size(); ++i) check_same(from_b.messages[i], at_a.messages[i]);
}

void budget_gives_others_a_turn(Scheme scheme) {
  Ends e(scheme);
  Random random(9);
  std::vector<Message> sent;
  for (int i = 0; i < 10; ++i) sent.push_back(random_message(random, 20 * kKiB));
  RecordingInbox inbox;
  for (const Message& m : sent) {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  CHECK(readable(*e.b));
  CHECK(receive(*e.b, inbox, 1) == ReceiveState::kMore);
  CHECK(inbox.messages.size() < 10);
  int turns = 1;
  while (inbox.messages.size() < 10) {
    CHECK(readable(*e.b, 0));  // the rest must not wait for more data
    CHECK(receive(*e.b, inbox, 30 * kKiB) != ReceiveState::kBroken);
    ++turns;
  }
  CHECK(turns > 2);
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK(!readable(*e.b, 0));
}

// ---- busy polling

/// Returns whether this link can be busy polled. Other links are skipped.
bool stays_awake(Scheme scheme) { return Ends(scheme).a->enable_busy_poll(); }

void a_busy_polled_receiver_needs_no_wake_up(Scheme scheme) {
  if (!stays_awake(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(31);
  const Message m = random_message(random, 100, {200});
  std::size_t count = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK(e.b->enable_busy_poll());
    CHECK(!e.b->ready());
    send_whole(*e.a, m, *e.b, inbox);
    CHECK(e.b->ready());
    CHECK(!readable(*e.b, 0));
    CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
    CHECK_EQ(inbox.messages.size(), ++count);
    CHECK(!e.b->ready());
    CHECK(e.b->arm_wakeup());
    send_whole(*e.a, m, *e.b, inbox);
    CHECK(readable(*e.b, 0));
    CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
    CHECK_EQ(inbox.messages.size(), ++count);
    CHECK(!readable(*e.b, 0));
  }
}

void no_message_is_missed_when_busy_polling_ends(Scheme scheme) {
  if (!stays_awake(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(32);
  const Message m = random_message(random, 100);
  CHECK(e.b->enable_busy_poll());
  send_whole(*e.a, m, *e.b, inbox);
  CHECK(!e.b->arm_wakeup());
  CHECK(e.b->ready());
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK_EQ(inbox.messages.size(), 1u);
  CHECK(e.b->arm_wakeup());
  CHECK(!readable(*e.b, 0));
}

void a_busy_polled_receiver_notices_the_end(Scheme scheme) {
  if (!stays_awake(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(33);
  CHECK(e.b->enable_busy_poll());
  send_whole(*e.a, random_message(random, 100), *e.b, inbox);
  e.a.reset();
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 1u);
  CHECK_EQ(e.b->error().text, "");
}

/// An end that ends busy polling while the other end sends is still woken.
void no_wake_up_is_lost(Scheme scheme) {
  if (!stays_awake(scheme)) return;
  Ends e(scheme);
  const int count = times(20000);
  auto bounce = [count](Link& link, std::uint64_t seed, bool begins) {
    RecordingInbox inbox;
    Random random(seed);
    const Message m = random_message(random, 10);
    for (int i = 0; i < count; ++i) {
      Outgoing out = m.outgoing();
      if (begins || i > 0) CHECK(link.send(out) == SendState::kSent);
      inbox.messages.clear();
      while (inbox.messages.empty()) {
        bool awake = random.below(3) > 0 && link.enable_busy_poll();
        for (std::size_t looks = random.below(40); awake && looks > 0; --looks) {
          if (link.ready()) CHECK(receive(link, inbox, kAnyBudget) == ReceiveState::kIdle);
          if (!inbox.messages.empty()) break;
        }
        if (!inbox.messages.empty()) break;
        if (!link.arm_wakeup()) continue;
        readable(link);
        CHECK(receive(link, inbox, kAnyBudget) != ReceiveState::kBroken);
      }
    }
    if (!begins) {
      Outgoing out = m.outgoing();
      CHECK(link.send(out) == SendState::kSent);
    }
  };
  std::thread other([&] { bounce(*e.b, 34, false); });
  bounce(*e.a, 35, true);
  other.join();
}

void a_sender_that_waits_hears_from_an_awake_receiver(Scheme scheme) {
  if (!stays_awake(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  CHECK(e.b->enable_busy_poll());
  Clogged c = clog(*e.a, 6 * kMiB);  // small enough that it does not wait for arena space
  SendState state = SendState::kBlocked;
  while (inbox.messages.size() < c.messages.size()) {
    if (e.b->ready() || readable(*e.b, 0)) CHECK(receive(*e.b, inbox, 64 * kKiB) != ReceiveState::kBroken);
    if (state == SendState::kBlocked && writable(*e.a, 0)) state = e.a->send(*c.sent.back());
  }
  CHECK(state == SendState::kSent);
  for (std::size_t i = 0; i < c.messages.size(); ++i) check_same(c.messages[i], inbox.messages[i]);
}

const bool registered = add_on_every_scheme({
    ON_LINKS(blocks_and_resumes),
    ON_LINKS(both_ends_full_at_once),
    ON_LINKS(budget_gives_others_a_turn),
    ON_LINKS(a_busy_polled_receiver_needs_no_wake_up),
    ON_LINKS(no_message_is_missed_when_busy_polling_ends),
    ON_LINKS(a_busy_polled_receiver_notices_the_end),
    ON_LINKS(no_wake_up_is_lost),
    ON_LINKS(a_sender_that_waits_hears_from_an_awake_receiver),
});

}  // namespace
}  // namespace telegrad::test

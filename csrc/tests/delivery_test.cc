// Which messages of a link have arrived, and which are kept to be sent again.
#include "transports/tcp/delivery.h"

#include <set>

#include "core/left_out.h"
#include "tests/links.h"

namespace telegrad::test {
namespace {

struct Owner final : KeepAlive {
  explicit Owner(int& live) : live(live) { ++live; }
  ~Owner() override { --live; }
  int& live;
};

Released spent;

void add(Unacknowledged& u, Outgoing& m) { u.keep(u.begin_next(), m); }

std::string text(std::string_view s) { return std::string(s); }
std::string text(const OutSegment& s) { return std::string(reinterpret_cast<const char*>(s.data), s.size); }

CASE(messages_in_order_are_counted) {
  Received r;
  for (std::uint64_t n = 0; n < 5; ++n) CHECK(r.add(n, 1));
  CHECK_EQ(r.count(), 5u);
  CHECK(!r.add(4, 1));
  CHECK(!r.add(0, 1));
  CHECK_EQ(r.count(), 5u);
}

/// Small messages may arrive before an earlier large one.
CASE(messages_in_any_order_are_counted_once) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint64_t> order(20);
    for (std::uint64_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    Received r;
    std::set<std::uint64_t> arrived;
    for (const std::uint64_t n : order) {
      CHECK(r.add(n, 1));
      CHECK(!r.add(n, 1));
      arrived.insert(n);
      std::uint64_t first = 0;
      while (arrived.contains(first)) ++first;
      CHECK_EQ(r.count(), first);
    }
  }
}

CASE(an_acknowledgement_is_due_after_many_messages_or_bytes) {
  Received r;
  for (std::uint64_t n = 0; n + 1 < kMessagesPerAck; ++n) r.add(n, 1);
  CHECK(!r.is_ack_due());
  r.add(kMessagesPerAck - 1, 1);
  CHECK(r.is_ack_due());
  CHECK_EQ(r.acknowledge().count, r.count());
  CHECK(!r.is_ack_due());
  std::uint64_t n = kMessagesPerAck;
  for (std::uint64_t bytes = 0; bytes < kBytesPerAck; bytes += kMaxCopied) {
    CHECK(!r.is_ack_due());
    r.add(n++, kMaxCopied);
  }
  CHECK(r.is_ack_due());
  CHECK_EQ(r.acknowledge().count, r.count());
  r.add(n, kMaxCopied + 1);  // its sender may keep the memory of a tensor for it
  CHECK(r.is_ack_due());
}

CASE(a_small_message_is_copied) {
  Random random(2);
  Message sent = random_message(random, 100, {300, 0, 20}, 8);
  const Message original = sent;
  Unacknowledged u;
  Outgoing m = sent.outgoing();
  m.header.timeout = 0;
  add(u, m);
  for (std::string* s : {&sent.name, &sent.body, &sent.segments[0], &sent.segments[2]}) s->assign(s->size(), 'z');
  const auto again = u.again(0, now(), spent);
  CHECK_EQ(text(again->name), original.name);
  CHECK_EQ(text(again->body), original.body);
  CHECK_EQ(again->segments.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) CHECK_EQ(text(again->segments[i]), original.segments[i]);
  CHECK_EQ(again->header.call_id, original.header.call_id);
  CHECK_EQ(again->header.credit, original.header.credit);
}

/// A tensor that no thread can change is sent again from its own memory, and released when it has arrived.
CASE(a_large_immutable_message_is_kept_until_it_has_arrived) {
  int live = 0;
  Random random(3);
  const Message sent = random_message(random, 8, {200'000});
  Unacknowledged u;
  Outgoing m = sent.outgoing();
  m.immutable = true;
  m.owner = std::make_unique<Owner>(live);
  add(u, m);
  CHECK_EQ(live, 1);
  auto again = u.again(0, now(), spent);
  CHECK(reinterpret_cast<const char*>(again->segments[0].data) == sent.segments[0].data());
  CHECK(!(again->header.flags & kLeftOut) || sent.header.flags & kLeftOut);
  Released arrived;
  CHECK(u.acknowledge({.count = 1}, arrived));
  CHECK_EQ(arrived.size(), 1u);
  arrived.clear();
  CHECK_EQ(live, 1);  // it is being sent again
  again.reset();
  CHECK_EQ(live, 0);
}

/// The caller waits, so that its tensor does not change; once it has given up, nothing of it is used.
CASE(the_memory_of_a_waiting_call_is_used_until_the_call_ends) {
  for (const bool gives_up : {false, true}) {
    int live = 0;
    Random random(8);
    Message sent = random_message(random, 8, {200'000, 10}, 4);
    const std::string original = sent.segments[0];
    sent.header.flags = kTrailer;
    Unacknowledged u;
    Outgoing m = sent.outgoing();
    m.stable = true;
    m.header.call_id = 7;
    m.owner = std::make_unique<Owner>(live);
    add(u, m);
    CHECK_EQ(live, 1);
    Released released;
    u.release(8, released);
    CHECK(released.empty());
    std::unique_ptr<Outgoing> again;
    if (!gives_up) again = u.again(0, now(), released);
    u.release(7, released);
    released.clear();
    CHECK_EQ(live, 0);
    sent.segments[0].assign(original.size(), 'z');
    if (gives_up) again = u.again(0, now(), released);
    CHECK_EQ(text(again->name), sent.name);
    CHECK_EQ(text(again->segments.back()), sent.segments[1]);
    CHECK_EQ(again->segments.size(), gives_up ? 1u : 2u);
    if (!gives_up) CHECK(text(again->segments[0]) == original);
    CHECK_EQ((again->header.flags & kLeftOut) != 0, gives_up);
  }
}

/// The memory of the others may have changed: nothing of it is sent again.
CASE(a_large_mutable_message_loses_its_content_but_not_its_trailer) {
  Random random(4);
  for (const FrameType type : {FrameType::kRequest, FrameType::kReply}) {
    Message sent = random_message(random, 8, {200'000, 30}, 5);
    sent.header.type = type;
    sent.header.flags = kTrailer | kMustDeliver;
    Unacknowledged u;
    Outgoing m = sent.outgoing();
    add(u, m);
    const auto again = u.again(0, now(), spent);
    CHECK(again->header.flags & kLeftOut);
    CHECK(again->body.starts_with(static_cast<char>(LeftOut::kBroken)));
    CHECK_SAYS(text(again->body), "retry=");
    CHECK_EQ(again->segments.size(), 1u);
    CHECK_EQ(text(again->segments[0]), sent.segments[1]);
    CHECK_EQ(again->header.name_id, sent.header.name_id);  // later messages use the name that it defines
    CHECK_EQ(text(again->name), sent.name);
  }
}

/// A message with an owner that knows whether its memory has changed.
Outgoing verifiable(const Message& sent, int& live, FrameType type = FrameType::kReply) {
  Outgoing m = sent.outgoing();
  m.header.type = type;
  m.header.flags = 0;
  m.verifiable = true;
  m.owner = std::make_unique<Owner>(live);
  return m;
}

/// Its memory may change from the answer on: a copy is sent again, also after further breaks.
CASE(an_unchanged_message_is_copied_and_sent_again) {
  for (const FrameType type : {FrameType::kRequest, FrameType::kReply}) {
    int live = 0;
    Random random(11);
    Message sent = random_message(random, 8, {200'000, 10}, 4);
    const Message original = sent;
    Unacknowledged u;
    Outgoing m = verifiable(sent, live, type);
    add(u, m);
    u.begin_verifying();
    CHECK(u.is_unverified(0));
    CHECK(u.has_unverified());
    const auto taken = u.take_unverified();
    CHECK(taken && taken->number == 0);
    CHECK(!u.take_unverified());
    auto copy = copy_of(*taken->message);
    for (std::string* s : {&sent.name, &sent.body, &sent.segments[0]}) s->assign(s->size(), 'z');
    CHECK(u.begin_check(*taken));
    Released released;
    u.end_check(*taken, std::move(copy), released);
    CHECK(!u.has_unverified());
    CHECK(!u.is_unverified(0));
    for (int breaks = 0; breaks < 2; ++breaks) {
      const auto again = u.again(0, now(), released);
      CHECK_EQ(text(again->name), original.name);
      CHECK_EQ(text(again->body), original.body);
      for (std::size_t i = 0; i < 2; ++i) CHECK(text(again->segments[i]) == original.segments[i]);
      CHECK(!(again->header.flags & kLeftOut));
    }
  }
}

CASE(a_changed_message_loses_its_content) {
  int live = 0;
  Random random(12);
  const Message sent = random_message(random, 8, {200'000});
  Unacknowledged u;
  Outgoing m = verifiable(sent, live);
  add(u, m);
  u.begin_verifying();
  auto taken = u.take_unverified();
  CHECK(u.begin_check(*taken));
  Released released;
  u.end_check(*taken, nullptr, released);
  CHECK(u.again(0, now(), released)->header.flags & kLeftOut);
  taken.reset();
  released.clear();
  CHECK_EQ(live, 0);
}

/// The owner need not be asked then, and its answer comes too late.
CASE(a_message_may_arrive_before_it_is_verified) {
  for (const bool is_asked : {false, true}) {
    int live = 0;
    Random random(13);
    const Message sent = random_message(random, 8, {200'000});
    Unacknowledged u;
    for (int n = 0; n < 2; ++n) {
      Outgoing m = verifiable(sent, live);
      add(u, m);
    }
    u.begin_verifying();
    auto taken = u.take_unverified();
    if (is_asked) CHECK(u.begin_check(*taken));
    Released released;
    CHECK(u.acknowledge({.count = 1}, released));
    if (!is_asked) CHECK(!u.begin_check(*taken));
    u.end_check(*taken, copy_of(*taken->message), released);
    CHECK(!u.is_unverified(0) && u.is_unverified(1));
    taken.reset();
    released.clear();
    CHECK_EQ(live, 1);
    CHECK_EQ(u.take_unverified()->number, 1u);
  }
}

/// An owner that does not answer in time: the program holds the GIL. A copy in progress ends without it.
CASE(messages_that_are_not_verified_in_time_lose_their_content) {
  int live = 0;
  Random random(14);
  const Message sent = random_message(random, 8, {200'000});
  Unacknowledged u;
  for (int n = 0; n < 3; ++n) {
    Outgoing m = verifiable(sent, live);
    add(u, m);
  }
  u.begin_verifying();
  auto copied = u.take_unverified(), asked = u.take_unverified();
  CHECK(u.begin_check(*asked));
  Released released;
  CHECK(u.give_up_verifying(released));
  CHECK(u.is_unverified(0) && !u.is_unverified(1) && !u.is_unverified(2));
  u.end_check(*asked, copy_of(*asked->message), released);  // late
  for (const std::uint64_t n : {1, 2}) CHECK(u.again(n, now(), released)->header.flags & kLeftOut);
  CHECK(u.begin_check(*copied));
  CHECK(!u.give_up_verifying(released));
  CHECK(u.again(0, now(), released)->header.flags & kLeftOut);
  copied.reset();
  asked.reset();
  released.clear();
  CHECK_EQ(live, 0);
}

/// The messages are verified after the next break.
CASE(messages_that_are_sent_after_a_break_wait_for_no_verification) {
  int live = 0;
  Random random(16);
  const Message sent = random_message(random, 8, {200'000});
  Unacknowledged u;
  const auto send = [&] {
    Outgoing m = verifiable(sent, live);
    add(u, m);
  };
  send();
  CHECK(!u.has_unverified());
  u.begin_verifying();
  send();
  CHECK_EQ(u.take_unverified()->number, 0u);
  CHECK(!u.take_unverified());
  Released released;
  CHECK(u.acknowledge({.count = 1}, released));
  CHECK(!u.has_unverified());
  CHECK(!u.give_up_verifying(released));
  u.begin_verifying();
  const auto taken = u.take_unverified();
  CHECK(taken && taken->number == 1);
}

/// The calls of both ends have the same numbers.
CASE(the_end_of_a_call_releases_no_reply) {
  int live = 0;
  Random random(15);
  const Message sent = random_message(random, 8, {200'000});
  Unacknowledged u;
  Outgoing m = verifiable(sent, live);
  m.header.call_id = 7;
  add(u, m);
  Released released;
  u.release(7, released);
  CHECK(released.empty());
  CHECK(u.is_unverified(0));
}

/// The peer needs the content of these.
CASE(a_large_message_that_must_arrive_is_copied) {
  Random random(5);
  Message one_way = random_message(random, 8, {200'000}), must_run = one_way, no_trailer = one_way;
  one_way.header.type = FrameType::kOneway;
  one_way.header.flags = 0;
  must_run.header.flags = kMustRun;
  no_trailer.header.flags = kMustDeliver;
  for (Message* sent : {&one_way, &must_run, &no_trailer}) {
    const std::string original = sent->segments[0];
    Unacknowledged u;
    Outgoing m = sent->outgoing();
    add(u, m);
    sent->segments[0].assign(original.size(), 'z');
    CHECK(text(u.again(0, now(), spent)->segments[0]) == original);
  }
}

/// Its last bytes arrive before its sender has kept it.
CASE(a_message_may_be_acknowledged_while_it_is_sent) {
  Random random(7);
  const Message sent = random_message(random, 10);
  Unacknowledged u;
  Released none;
  Outgoing first = sent.outgoing(), second = sent.outgoing();
  add(u, first);
  CHECK(!u.acknowledge({.count = 2}, none));
  const std::uint64_t number = u.begin_next();
  CHECK(!u.acknowledge({.count = 3}, none));
  CHECK(!u.has_arrived(number));
  CHECK(u.acknowledge({.count = 2}, none));
  CHECK(u.has_arrived(number));
  u.keep(number, second);
  CHECK_EQ(u.begin(), 2u);
  CHECK_EQ(u.end(), 2u);
  CHECK(!u.acknowledge({.count = 3}, none));
}

/// Small messages have overtaken it: they are not kept until it has arrived.
CASE(messages_behind_a_missing_one_are_acknowledged) {
  Random random(9);
  const Message sent = random_message(random, kMaxCopied);
  Unacknowledged u;
  Received r;
  Released none;
  Outgoing large = sent.outgoing();
  const std::uint64_t first = u.begin_next();
  for (std::uint64_t n = 1; n < 1000; ++n) {
    CHECK(u.has_room());
    Outgoing m = sent.outgoing();
    add(u, m);
    CHECK(r.add(n, 1));
    if (n % 10 == 0) CHECK(u.acknowledge(r.acknowledge(), none));
  }
  CHECK_EQ(u.begin(), first);
  CHECK(!u.has_arrived(first));
  CHECK(u.has_arrived(990) && !u.has_arrived(991));
  CHECK(u.again(990, now(), none)->header.type == FrameType::kPong);
  u.keep(first, large);
  CHECK(u.again(first, now(), none)->header.type != FrameType::kPong);
  CHECK(r.add(first, 1));
  CHECK_EQ(r.count(), 1000u);
  CHECK(u.acknowledge(r.acknowledge(), none));
  CHECK_EQ(u.begin(), 1000u);
}

/// Only one message is missing before the end of an acknowledgement.
CASE(an_acknowledgement_ends_at_the_second_gap) {
  Received r;
  for (const std::uint64_t n : {0, 2, 3, 5}) CHECK(r.add(n, 1));
  CHECK_EQ(r.acknowledge().count, 1u);
  CHECK_EQ(r.acknowledge().end, 4u);
  CHECK(r.add(1, 1));
  CHECK_EQ(r.acknowledge().count, 4u);
  CHECK_EQ(r.acknowledge().end, 6u);
}

CASE(the_time_left_is_stamped_again) {
  Message sent = Message();
  sent.header.type = FrameType::kRequest;
  Unacknowledged u;
  Outgoing m = sent.outgoing();
  m.deadline = 100 * kSecond;
  stamp_timeout(m, 10 * kSecond);
  add(u, m);
  CHECK_EQ(u.again(0, 70 * kSecond, spent)->header.timeout, 30 * kSecond);
  CHECK_EQ(u.again(0, 200 * kSecond, spent)->header.timeout, 1);
}

CASE(acknowledgements_release_the_room_of_copies) {
  Random random(6);
  const Message sent = random_message(random, kMaxCopied);
  Unacknowledged u;
  std::uint64_t n = 0;
  for (; u.has_room(); ++n) {
    CHECK(n < 1000);
    Outgoing m = sent.outgoing();
    add(u, m);
  }
  CHECK(n * kMaxCopied >= kMaxUnacknowledged - kMaxCopied);
  CHECK_EQ(u.end(), n);
  Released none;
  CHECK(!u.acknowledge({.count = n + 1}, none));  // never sent
  CHECK(u.acknowledge({.count = 1}, none));
  CHECK(u.has_room());
  CHECK_EQ(u.begin(), 1u);
  CHECK(u.acknowledge({.count = 0}, none));  // an older one
  CHECK_EQ(u.begin(), 1u);
  const auto arrived = u.again(0, now(), spent);
  CHECK(arrived->header.type == FrameType::kPong);
  CHECK(arrived->body.empty());
}

}  // namespace
}  // namespace telegrad::test

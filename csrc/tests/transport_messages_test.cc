// Conformance suite of the transport contract (core/transport.h): delivery, order and coalescing.
#include <thread>

#include "tests/transport_suite.h"

namespace telegrad::test {
namespace {

const std::vector<std::size_t> kSizes = {0, 1, 63, 64, 65, 64 * kKiB - 1, 64 * kKiB, 64 * kKiB + 1, 3 * kMiB + 7};

// ---- messages arrive complete and unchanged

void bodies_of_all_sizes(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(1);
  std::vector<Message> sent;
  for (std::size_t size : kSizes) sent.push_back(random_message(random, size));
  for (const Message& m : sent) send_whole(*e.a, m, *e.b, inbox);
  receive_until(*e.b, inbox, sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) check_same(sent[i], inbox.messages[i]);
}

void names_of_all_sizes(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(2);
  std::vector<Message> sent;
  for (std::size_t size : kSizes) {
    if (size <= Limits{}.name) sent.push_back(random_message(random, size, {size}, size));
  }
  CHECK(sent.size() >= 7);
  for (const Message& m : sent) send_whole(*e.a, m, *e.b, inbox);
  receive_until(*e.b, inbox, sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) check_same(sent[i], inbox.messages[i]);
}

void segments_of_all_sizes(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(3);
  std::vector<Message> sent;
  for (std::size_t size : kSizes) sent.push_back(random_message(random, 10, {size}));
  sent.push_back(random_message(random, 0, kSizes, 5));
  std::vector<std::size_t> back(kSizes.rbegin(), kSizes.rend());
  sent.push_back(random_message(random, 70000, back));
  for (const Message& m : sent) send_whole(*e.b, m, *e.a, inbox);
  receive_until(*e.a, inbox, sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) check_same(sent[i], inbox.messages[i]);
}

void many_segments(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(4);
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < 1000; ++i) sizes.push_back(i % 130);
  std::vector<std::size_t> buffers(3000, 1);  // more than IOV_MAX
  std::vector<std::size_t> nothing(1000, 0);
  const Message sent[] = {random_message(random, 3, sizes), random_message(random, 3, buffers),
                          random_message(random, 0, nothing)};
  for (std::size_t i = 0; i < 3; ++i) {
    send_whole(*e.a, sent[i], *e.b, inbox);
    receive_until(*e.b, inbox, i + 1);  // the last one, without bytes, would overtake the others over lanes
    check_same(sent[i], inbox.messages[i]);
  }
}

void both_directions_in_order(Scheme scheme) {
  Ends e(scheme);
  const int count = times(20000);
  auto run = [&](Link& mine, std::uint64_t seed, RecordingInbox& inbox) {
    Random random(seed);
    for (int i = 0; i < count;) {
      Message m = random_message(random, random.below(100));
      m.header.call_id = static_cast<std::uint64_t>(i);
      Outgoing out = m.outgoing();
      SendState state;
      while ((state = mine.send(out)) == SendState::kBlocked) {
        receive(mine, inbox, kAnyBudget);
        if (!polls(mine, POLLIN | POLLOUT, -1)) break;
      }
      CHECK(state == SendState::kSent);
      if (++i % 64 == 0) receive(mine, inbox, kAnyBudget);
    }
    receive_until(mine, inbox, static_cast<std::size_t>(count));
  };
  RecordingInbox at_a, at_b;
  std::thread other([&] { run(*e.b, 6, at_b); });
  run(*e.a, 5, at_a);
  other.join();
  for (int i = 0; i < count; ++i) {
    CHECK_EQ(at_a.messages[static_cast<std::size_t>(i)].header.call_id, static_cast<std::uint64_t>(i));
    CHECK_EQ(at_b.messages[static_cast<std::size_t>(i)].header.call_id, static_cast<std::uint64_t>(i));
  }
}

void memory_is_free_after_sent(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(7);
  Message m = random_message(random, 500, {3000, 100}, 30);
  const Message original = m;
  {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  std::ranges::fill(m.body, 'x');
  std::ranges::fill(m.name, 'x');
  for (auto& s : m.segments) std::ranges::fill(s, 'x');
  receive_until(*e.b, inbox, 1);
  check_same(original, inbox.messages[0]);
}

void sends_while_it_receives(Scheme scheme) {
  Ends e(scheme);
  const int count = times(3000);
  Random random(8);
  std::vector<Message> sent;
  for (int i = 0; i < count; ++i) sent.push_back(random_message(random, random.below(3000), {random.below(20000)}));
  auto send = [&](Link& link) {
    for (const Message& m : sent) {
      Outgoing out = m.outgoing();
      while (link.send(out) == SendState::kBlocked) writable(link);
    }
  };
  RecordingInbox at_a, at_b;
  std::thread threads[] = {std::thread([&] { send(*e.a); }), std::thread([&] { send(*e.b); }),
                           std::thread([&] { receive_until(*e.a, at_a, sent.size()); }),
                           std::thread([&] { receive_until(*e.b, at_b, sent.size()); })};
  for (auto& t : threads) t.join();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    check_same(sent[i], at_a.messages[i]);
    check_same(sent[i], at_b.messages[i]);
  }
}

// ---- coalesced messages

/// Returns whether this link buffers messages. Other links are skipped: the contract requires nothing else of them.
bool holds(Scheme scheme) {
  const Message m;
  return Ends(scheme).a->buffer(m.outgoing());
}

void held_messages_leave_in_order(Scheme scheme) {
  if (!holds(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(21);
  std::vector<Message> sent;
  for (std::size_t i = 0; i < 7; ++i) sent.push_back(random_message(random, 10 * i, {i, 3}, i));
  if (scheme.ends_with("lanes")) {  // where any segment makes a message large, which others overtake
    for (Message& m : sent) m.segments.clear();
  }
  auto hold = [&](std::size_t i) { CHECK(e.a->buffer(sent[i].outgoing())); };
  auto send = [&](std::size_t i) { send_whole(*e.a, sent[i], *e.b, inbox); };
  hold(0);
  hold(1);
  CHECK(!readable(*e.b, 0));
  send(2);  // flushes the buffer
  send(3);
  hold(4);
  CHECK(e.a->flush() == SendState::kSent);
  hold(5);
  sent[6] = random_message(random, 0, {300000});
  send(6);
  receive_until(*e.b, inbox, sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) check_same(sent[i], inbox.messages[i]);
}

void held_messages_are_copied(Scheme scheme) {
  if (!holds(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(22);
  Message m = random_message(random, 50, {100}, 30);
  const Message original = m;
  CHECK(e.a->buffer(m.outgoing()));
  std::ranges::fill(m.body, 'x');
  std::ranges::fill(m.name, 'x');
  std::ranges::fill(m.segments[0], 'x');
  CHECK(e.a->flush() == SendState::kSent);
  receive_until(*e.b, inbox, 1);
  check_same(original, inbox.messages[0]);
}

void few_bytes_are_held(Scheme scheme) {
  if (!holds(scheme)) return;
  Ends e(scheme);
  Random random(23);
  CHECK(!e.a->buffer(random_message(random, kMiB).outgoing()));
  const Message m = random_message(random, 100);
  std::size_t count = 0;
  while (e.a->buffer(m.outgoing())) CHECK(++count < kMiB / 100);
  RecordingInbox inbox;
  CHECK(e.a->flush() == SendState::kSent);
  receive_until(*e.b, inbox, count);
}

void held_messages_wait_for_a_peer_that_does_not_read(Scheme scheme) {
  if (!holds(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(24);
  const Message small = random_message(random, 700), last = random_message(random, 5, {7});
  std::size_t count = 0;
  do {
    while (e.a->buffer(small.outgoing())) ++count;
  } while (e.a->flush() == SendState::kSent);
  Outgoing out = last.outgoing();
  CHECK(e.a->send(out) == SendState::kBlocked);
  while (e.a->send(out) == SendState::kBlocked) receive(*e.b, inbox, kAnyBudget);
  receive_until(*e.b, inbox, count + 1);
  for (std::size_t i = 0; i < count; ++i) check_same(small, inbox.messages[i]);
  check_same(last, inbox.messages[count]);
}

const bool registered = add_on_every_scheme({
    ON_LINKS(bodies_of_all_sizes),
    ON_LINKS(names_of_all_sizes),
    ON_LINKS(segments_of_all_sizes),
    ON_LINKS(many_segments),
    ON_LINKS(both_directions_in_order),
    ON_LINKS(memory_is_free_after_sent),
    ON_LINKS(sends_while_it_receives),
    ON_LINKS(held_messages_leave_in_order),
    ON_LINKS(held_messages_are_copied),
    ON_LINKS(few_bytes_are_held),
    ON_LINKS(held_messages_wait_for_a_peer_that_does_not_read),
});

}  // namespace
}  // namespace telegrad::test

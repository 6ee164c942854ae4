// The conformance suite of the transport contract, core/transport.h: every function below runs on every scheme. It is
// longer than other files of the project, so that authors of a transport find all requirements in one place.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>

#include "base/peer_credentials.h"
#include "tests/links.h"

namespace telegrad::test {
namespace {

using Scheme = const std::string&;

constexpr std::size_t kKiB = 1024;
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
  for (const Message& m : sent) send_whole(*e.a, m, *e.b, inbox);
  receive_until(*e.b, inbox, 3);
  for (std::size_t i = 0; i < 3; ++i) check_same(sent[i], inbox.messages[i]);
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

// ---- leased memory

/// Leases memory of `a`, which may first have to exchange packets with `b`.
std::optional<LinkLease> lease(Ends& e, std::size_t size) {
  for (int turn = 0; turn < 20; ++turn) {
    if (auto leased = e.a->lease(size)) return leased;
    RecordingInbox nothing;
    receive(*e.b, nothing, kAnyBudget);
    receive(*e.a, nothing, kAnyBudget);
    CHECK(nothing.messages.empty());
  }
  return std::nullopt;
}

/// Returns whether this link leases memory. Other links are skipped: the contract requires nothing else of them.
bool lends(Scheme scheme) {
  Ends e(scheme);
  return lease(e, 1).has_value();
}

/// A message with segments in leased memory, filled with `fill`.
struct LentMessage {
  LentMessage(Ends& e, const std::vector<std::size_t>& sizes, char fill) {
    original.header.type = FrameType::kRequest;
    for (std::size_t size : sizes) {
      auto leased = lease(e, size);
      CHECK(leased && leased->lease != 0 && leased->memory->size() == size);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(leased->memory->data()) % kAlignment, 0u);
      std::memset(leased->memory->data(), fill, size);
      original.segments.push_back(std::string(size, fill));
      out.segments.push_back({leased->memory->data(), size, leased->lease});
      blocks.push_back(std::move(leased->memory));
    }
    out.header = original.header;
  }
  Message original;
  Outgoing out;
  std::vector<BlockPtr> blocks;
};

void lent_memory_is_handed_over(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  LentMessage m(e, {0, 1, 64, 3 * kMiB + 7}, 'a');
  const std::string bytes(5000, 'b');  // in addition, a segment that is not leased
  m.original.segments.push_back(bytes);
  m.out.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  CHECK(e.a->send(m.out) == SendState::kSent);
  m.blocks.clear();  // the receiver holds the memory now
  receive_until(*e.b, inbox, 1);
  check_same(m.original, inbox.messages[0]);
  CHECK_EQ(inbox.allocations, 1);
}

void lent_memory_outlives_the_link(Scheme scheme) {
  if (!lends(scheme)) return;
  RecordingInbox inbox;
  std::optional<LentMessage> m, unsent;
  {
    Ends e(scheme);
    m.emplace(e, std::vector<std::size_t>{1000}, 'c');
    unsent.emplace(e, std::vector<std::size_t>{1000}, 'd');
    CHECK(e.a->send(m->out) == SendState::kSent);
    receive_until(*e.b, inbox, 1);
    e.a->close();
  }
  m->blocks.clear();
  check_same(m->original, inbox.messages[0]);
  CHECK(static_cast<char>(unsent->blocks[0]->data()[999]) == 'd');
}

void leases_are_returned(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  for (Link* link : {e.a.get(), e.b.get()}) link->set_limits({.leased = 16 * kMiB});
  std::size_t most = kMiB;  // more than half of all memory that it leases
  while (lease(e, 2 * most)) most *= 2;
  for (bool sent : {true, false, true}) {
    RecordingInbox inbox;
    {
      LentMessage m(e, {most}, 'e');
      if (sent) CHECK(e.a->send(m.out) == SendState::kSent);
      CHECK(!e.a->lease(most));
    }
    if (sent) {
      CHECK(!e.a->lease(most));  // not received yet
      receive_until(*e.b, inbox, 1);
      CHECK(!e.a->lease(most));  // held by the receiver
      std::thread elsewhere([&] { inbox.messages.clear(); });
      elsewhere.join();
    }
    // The lease may be returned with the link's next frame.
    RecordingInbox at_a;
    while (!e.a->lease(most)) receive(*e.a, at_a, kAnyBudget);
  }
}

void nothing_to_lend_means_bytes(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  for (Link* link : {e.a.get(), e.b.get()}) link->set_limits({.leased = 16 * kMiB});
  std::vector<LinkLease> all;
  std::size_t size = 256 * kMiB;
  for (; size >= kKiB; size /= 2) {
    while (auto leased = lease(e, size)) all.push_back(std::move(*leased));
  }
  RecordingInbox inbox;
  Random random(17);
  const Message m = random_message(random, 10, {3000});
  send_whole(*e.a, m, *e.b, inbox);
  receive_until(*e.b, inbox, 1);
  check_same(m, inbox.messages[0]);
}

/// A lease of another link, or of no link.
void an_unknown_lease_means_bytes(Scheme scheme) {
  Ends e(scheme), other(scheme);
  RecordingInbox inbox;
  Random random(18);
  const Message m = random_message(random, 10, {3000, 100});
  Outgoing out = m.outgoing();
  const auto leased = lease(other, 3000);
  out.segments[0].lease = leased ? leased->lease : 1;
  out.segments[1].lease = 1234567;
  CHECK(e.a->send(out) == SendState::kSent);
  receive_until(*e.b, inbox, 1);
  check_same(m, inbox.messages[0]);
}

void lent_memory_is_given_once(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  LentMessage m(e, {5000}, 'g');
  for (int i = 0; i < 3; ++i) {  // the same memory for several messages: all but the first are copied
    Outgoing again;
    again.header = m.out.header;
    again.segments = m.out.segments;
    CHECK(e.a->send(again) == SendState::kSent);
  }
  m.blocks.clear();
  receive_until(*e.b, inbox, 3);
  CHECK_EQ(inbox.allocations, 2);
  for (int i = 0; i < 3; ++i) {
    check_same(m.original, inbox.messages[0]);
    std::memset(inbox.messages[0].segments[0]->data(), 'x', 5000);
    inbox.messages.erase(inbox.messages.begin());
  }
}

void a_part_of_lent_memory_is_handed_over(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  struct Part {
    std::size_t begin, size;
    bool aligned;
  };
  for (const Part& part :
       {Part{64, 1000, true}, Part{4096, 4096, true}, Part{8256, 60000, true}, Part{4, 500, false}}) {
    RecordingInbox inbox;
    LentMessage m(e, {100000}, 'h');
    OutSegment& s = m.out.segments[0];
    s = {s.data + part.begin, part.size, s.lease};
    m.original.segments[0].resize(part.size);
    CHECK(e.a->send(m.out) == SendState::kSent);
    m.blocks.clear();
    receive_until(*e.b, inbox, 1);
    check_same(m.original, inbox.messages[0]);
    CHECK_EQ(inbox.allocations, part.aligned ? 0 : 1);
  }
}

void limits_hold_for_lent_memory(Scheme scheme) {
  if (!lends(scheme)) return;
  Ends e(scheme);
  RecordingInbox inbox;
  e.b->set_limits({.body = 100, .message = 50, .segments = 3, .name = 10});
  LentMessage m(e, {30, 21}, 'f');
  CHECK(e.a->send(m.out) == SendState::kSent);
  receive_until_broken(*e.b, inbox);
  CHECK(inbox.messages.empty());
  CHECK_SAYS(e.b->error(), "limit");
}

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
  CHECK_EQ(e.b->error(), "");
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

// ---- limits

void refuses(Scheme scheme, const Limits& limits, const Message& message) {
  Ends e(scheme);
  RecordingInbox inbox;
  e.b->set_limits(limits);
  Outgoing out = message.outgoing();
  CHECK(e.a->send(out) == SendState::kSent);
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.allocations, 0);
  CHECK(inbox.messages.empty());
  CHECK_SAYS(e.b->error(), "limit");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK_SAYS(e.b->error(), "limit");
}

void limits_are_checked_before_memory_is_taken(Scheme scheme) {
  const Limits limits{.body = 100, .message = 50, .segments = 3, .name = 10};
  Random random(10);
  const Message fits = random_message(random, 100, {20, 20, 10}, 10);
  {
    Ends e(scheme);
    RecordingInbox inbox;
    e.b->set_limits(limits);
    send_whole(*e.a, fits, *e.b, inbox);
    receive_until(*e.b, inbox, 1);
    check_same(fits, inbox.messages[0]);
  }
  refuses(scheme, limits, random_message(random, 101));
  refuses(scheme, limits, random_message(random, 1, {51}));
  refuses(scheme, limits, random_message(random, 1, {20, 20, 11}));
  refuses(scheme, limits, random_message(random, 1, {1, 1, 1, 1}));
  refuses(scheme, limits, random_message(random, 1, {}, 11));
}

void a_frame_over_the_limits_spares_those_before_it(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  e.b->set_limits({.body = 100, .message = 100, .segments = 3, .name = 10});
  Random random(11);
  const Message good = random_message(random, 50), bad = random_message(random, 101);
  for (const Message* m : {&good, &bad, &good}) {
    Outgoing out = m->outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 1u);
  check_same(good, inbox.messages[0]);
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK_EQ(inbox.messages.size(), 1u);
}

void limits_change_from_inside_deliver(Scheme scheme) {
  struct Opening final : Inbox {
    Link* link;
    RecordingInbox inner;
    BlockPtr allocate(std::size_t size) override { return inner.allocate(size); }
    void deliver(Incoming&& m) override {
      inner.deliver(std::move(m));
      link->set_limits(Limits{});
    }
  };
  Ends e(scheme);
  e.b->set_limits(kHandshakeLimits);
  Random random(12);
  const Message small = random_message(random, 4096), large = random_message(random, 9000, {5000}, 10);
  Opening inbox;
  inbox.link = e.b.get();
  for (const Message* m : {&small, &large}) {
    Outgoing out = m->outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  while (inbox.inner.messages.size() < 2) {
    readable(*e.b);
    CHECK(receive(*e.b, inbox, kAnyBudget) != ReceiveState::kBroken);
  }
  check_same(small, inbox.inner.messages[0]);
  check_same(large, inbox.inner.messages[1]);
}

/// The content of a request or a reply without memory is read and discarded; the rest arrives.
void no_memory_costs_the_content_of_one_message(Scheme scheme) {
  RecordingInbox inbox;
  {
    Ends e(scheme);
    inbox.refuse_from = 70'000;
    // A shared-memory link needs no such block for a segment, but one for the body.
    const std::vector<std::size_t> sizes[] = {{80'000}, {9'000, 500'000, 80'000}, {60'000}, {100, 3 * kMiB, 12}};
    Random random(13);
    std::vector<Message> sent;
    for (const auto& segments : sizes) {
      for (const FrameType type : {FrameType::kRequest, FrameType::kReply}) {
        for (const bool trailer : {true, false}) {
          sent.push_back(random_message(random, 100'000, segments, 20));
          sent.back().header.type = type;
          sent.back().header.flags = trailer ? kTrailer : 0;
          if (trailer) sent.back().segments.push_back(random.bytes(3'000));
          sent.push_back(random_message(random, 200, {100}));
        }
      }
    }
    for (const Message& m : sent) send_whole(*e.a, m, *e.b, inbox);
    receive_until(*e.b, inbox, sent.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      const Incoming& got = inbox.messages[i];
      if (i % 2 == 1) {
        check_same(sent[i], got);
        CHECK_EQ(got.discarded, 0u);
        continue;
      }
      std::size_t size = sent[i].body.size();
      for (const std::string& s : sent[i].segments) size += s.size();
      CHECK_EQ(got.discarded, size);
      CHECK_EQ(got.payload_size(), size);
      Message rest = sent[i];
      rest.body = {};
      rest.segments.erase(rest.segments.begin(), rest.segments.end() - (rest.header.flags & kTrailer ? 1 : 0));
      check_same(rest, got);
    }
    inbox.messages.clear();
  }
  CHECK_EQ(inbox.pool->stats().live_blocks, 0u);
}

void no_memory_breaks_the_link(Scheme scheme, bool oneway) {
  RecordingInbox inbox;
  {
    Ends e(scheme);
    inbox.refuse_from = 5000;
    Random random(13);
    Message small = random_message(random, 100), large = random_message(random, oneway ? 70'000 : 5000, {4000});
    if (oneway) large.header.type = FrameType::kOneway;
    for (const Message* m : {&small, &large, &small}) {
      Outgoing out = m->outgoing();
      CHECK(e.a->send(out) == SendState::kSent);
    }
    receive_until_broken(*e.b, inbox);
    CHECK_EQ(inbox.messages.size(), 1u);
    CHECK_SAYS(e.b->error(), "memory");
    CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
    CHECK_EQ(inbox.messages.size(), 1u);
    inbox.messages.clear();
  }
  CHECK_EQ(inbox.pool->stats().live_blocks, 0u);
}

/// Messages that have no reply, or that are so small that nothing else would work either.
void no_memory_for_what_must_arrive_breaks_the_link(Scheme scheme) {
  for (const bool oneway : {true, false}) no_memory_breaks_the_link(scheme, oneway);
}

void a_trailer_has_a_limit_of_its_own(Scheme scheme) {
  const Limits limits{.body = 100, .message = 50, .segments = 3, .name = 10, .trailer = 60};
  Random random(19);
  Message fits = random_message(random, 100, {50, 60}), large = random_message(random, 1, {1, 61});
  fits.header.flags = large.header.flags = kTrailer;
  Ends e(scheme);
  RecordingInbox inbox;
  e.b->set_limits(limits);
  send_whole(*e.a, fits, *e.b, inbox);
  receive_until(*e.b, inbox, 1);
  check_same(fits, inbox.messages[0]);
  refuses(scheme, limits, large);
}

// ---- end of the link

void sent_data_survives_close(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(14);
  std::vector<Message> sent;
  for (int i = 0; i < 10; ++i) sent.push_back(random_message(random, 500, {1000}));
  for (const Message& m : sent) {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  e.a->close();
  e.a.reset();
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 10u);
  for (std::size_t i = 0; i < 10; ++i) check_same(sent[i], inbox.messages[i]);
  CHECK_EQ(e.b->error(), "");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK_EQ(inbox.messages.size(), 10u);
  CHECK_EQ(e.b->error(), "");
}

/// A send that fails because the other end has closed must not lose the data that the other end sent before.
void sent_data_survives_a_failed_send(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(15);
  const Message m = random_message(random, 500, {1000});
  for (int i = 0; i < 10; ++i) {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  e.a->close();
  e.a.reset();
  SendState state;
  do {
    Outgoing out = m.outgoing();
    state = e.b->send(out);
    CHECK(state != SendState::kBlocked);
  } while (state == SendState::kSent);
  CHECK(readable(*e.b, 0));
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 10u);
  Outgoing out = m.outgoing();
  CHECK(e.b->send(out) == SendState::kBroken);
}

void close_ends_both_directions(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  CHECK_EQ(e.a->error(), "");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
  e.a->close();
  e.a->close();
  const Message m;
  Outgoing out = m.outgoing();
  CHECK(e.a->send(out) == SendState::kBroken);
  receive_until_broken(*e.a, inbox);
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(e.b->error(), "");
  e.a->close();
  e.b->close();
  Outgoing back = m.outgoing();
  CHECK(e.b->send(back) == SendState::kBroken);
  CHECK(inbox.messages.empty());
}

void close_wakes_both_ends(Scheme scheme) {
  for (int i = 0; i < 20; ++i) {
    Ends e(scheme);
    RecordingInbox at_a, at_b;
    std::thread reading_a([&] { receive_until_broken(*e.a, at_a); });
    std::thread reading_b([&] { receive_until_broken(*e.b, at_b); });
    std::thread closing([&] { e.a->close(); });
    e.a->close();
    closing.join();
    reading_a.join();
    reading_b.join();
    CHECK_EQ(e.b->error(), "");
  }
}

void close_while_sending(Scheme scheme) {
  for (int i = 0; i < 10; ++i) {
    Ends e(scheme);
    RecordingInbox at_b;
    Random random(16);
    const Message m = random_message(random, 100, {200 * kKiB});
    Counter sends;
    std::thread sending([&] {
      while (true) {
        Outgoing out = m.outgoing();
        SendState state;
        while ((state = e.a->send(out)) == SendState::kBlocked) writable(*e.a);
        if (state == SendState::kBroken) return;
        sends.add();
      }
    });
    std::thread reading([&] { receive_until_broken(*e.b, at_b); });
    sends.wait_for(3);
    e.a->close();
    sending.join();
    reading.join();
    for (const Incoming& got : at_b.messages) check_same(m, got);  // complete or not at all
  }
}

void all_memory_is_released(Scheme scheme) {
  {
    Ends warm_up(scheme);
  }
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    Ends e(scheme);
    CHECK(open_descriptors() > before);
    if (i % 2) e.a->close();
    if (i % 3) e.b.reset();
  }
  {
    const std::string address = fresh_address(scheme);
    auto listener = find_transport(address)->listen(address);
    auto never_accepted = find_transport(address)->connect(listener->address());
  }
  CHECK_EQ(open_descriptors(), before);
}

// ---- connecting

void a_listener_has_an_address(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  Transport* transport = find_transport(address);
  auto listener = transport->listen(address);
  CHECK(listener->address().starts_with(scheme + ":"));
  CHECK(listener->accept() == nullptr);
  CHECK(!readable(listener->fd(), 0));
  std::string why;
  try {
    auto second = transport->listen(listener->address());
  } catch (const std::system_error& e) {
    why = e.what();
  }
  CHECK_SAYS(why, listener->address());
}

/// Data sent before the other end accepts is signaled as well.
void sent_before_it_is_accepted(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  Transport* transport = find_transport(address);
  auto listener = transport->listen(address);
  auto a = transport->connect(listener->address());
  Random random(19);
  const Message m = random_message(random, 100);
  Outgoing out = m.outgoing();
  while (a->send(out) == SendState::kBlocked) writable(a->fd());
  CHECK(readable(listener->fd()));
  auto b = listener->accept();
  CHECK(b != nullptr);
  RecordingInbox inbox;
  receive_until(*b, inbox, 1);
  check_same(m, inbox.messages[0]);
}

void an_address_without_listener(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  Transport* transport = find_transport(address);
  std::string gone = transport->listen(address)->address();  // closed at once
  std::string why;
  try {
    auto link = transport->connect(gone);
    RecordingInbox inbox;
    const Message m;
    Outgoing out = m.outgoing();
    while (link->send(out) == SendState::kBlocked) writable(link->fd());
    receive_until_broken(*link, inbox);
    why = link->error();
  } catch (const std::system_error& e) {
    CHECK_SAYS(e.what(), gone);
    why = e.what();
  }
  CHECK_SAYS(why, "refused");
}

void peer_credentials_are_reported(Scheme scheme) {
  Ends e(scheme);
  CredentialLookup lookup;
  for (const Link* link : {e.a.get(), e.b.get()}) {
    CHECK(link->describe().starts_with(scheme));
    const PeerCredentials user = link->peer_credentials(lookup);
    CHECK(user.kind == PeerCredentials::Kind::kUser);
    CHECK_EQ(user.uid, geteuid());
    CHECK_EQ(link->source(), scheme == "tcp" ? "127.0.0.1" : "");
  }
}

// ---- all functions on all schemes

struct Row {
  const char* name;
  void (*run)(Scheme);
  bool of_links;  // else about connecting, which the engine does for lanes
};
#define ROW(f) {#f, f, true}
#define ROW_OF_TRANSPORTS(f) {#f, f, false}
const Row kSuite[] = {
    ROW(bodies_of_all_sizes),
    ROW(names_of_all_sizes),
    ROW(segments_of_all_sizes),
    ROW(many_segments),
    ROW(both_directions_in_order),
    ROW(memory_is_free_after_sent),
    ROW(sends_while_it_receives),
    ROW(held_messages_leave_in_order),
    ROW(held_messages_are_copied),
    ROW(few_bytes_are_held),
    ROW(held_messages_wait_for_a_peer_that_does_not_read),
    ROW(lent_memory_is_handed_over),
    ROW(lent_memory_outlives_the_link),
    ROW(leases_are_returned),
    ROW(nothing_to_lend_means_bytes),
    ROW(an_unknown_lease_means_bytes),
    ROW(lent_memory_is_given_once),
    ROW(a_part_of_lent_memory_is_handed_over),
    ROW(limits_hold_for_lent_memory),
    ROW(blocks_and_resumes),
    ROW(both_ends_full_at_once),
    ROW(budget_gives_others_a_turn),
    ROW(a_busy_polled_receiver_needs_no_wake_up),
    ROW(no_message_is_missed_when_busy_polling_ends),
    ROW(a_busy_polled_receiver_notices_the_end),
    ROW(no_wake_up_is_lost),
    ROW(a_sender_that_waits_hears_from_an_awake_receiver),
    ROW(limits_are_checked_before_memory_is_taken),
    ROW(a_frame_over_the_limits_spares_those_before_it),
    ROW(limits_change_from_inside_deliver),
    ROW(no_memory_costs_the_content_of_one_message),
    ROW(no_memory_for_what_must_arrive_breaks_the_link),
    ROW(a_trailer_has_a_limit_of_its_own),
    ROW(sent_data_survives_close),
    ROW(sent_data_survives_a_failed_send),
    ROW(close_ends_both_directions),
    ROW(close_wakes_both_ends),
    ROW(close_while_sending),
    ROW(all_memory_is_released),
    ROW_OF_TRANSPORTS(a_listener_has_an_address),
    ROW_OF_TRANSPORTS(sent_before_it_is_accepted),
    ROW_OF_TRANSPORTS(an_address_without_listener),
    ROW_OF_TRANSPORTS(peer_credentials_are_reported),
};

const char* const kSchemes[] = {
    "shm",    "unix", "tcp",
    "lanes",  // tcp with lanes, see Ends
    "inproc",
};

const bool registered = [] {
  for (const std::string scheme : kSchemes) {
    for (const Row& row : kSuite) {
      if (scheme == "lanes" && !row.of_links) continue;
      add_case(scheme + "/" + row.name, [scheme, run = row.run] { run(scheme); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace telegrad::test

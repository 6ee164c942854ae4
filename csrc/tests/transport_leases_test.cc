// Conformance suite of the transport contract (core/transport.h): segments in leased memory.
#include <unistd.h>

#include <cstring>
#include <optional>
#include <thread>

#include "tests/transport_suite.h"

namespace telegrad::test {
namespace {

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
  CHECK_SAYS(e.b->error().text, "limit");
}

const bool registered = add_on_every_scheme({
    ON_LINKS(lent_memory_is_handed_over),
    ON_LINKS(lent_memory_outlives_the_link),
    ON_LINKS(leases_are_returned),
    ON_LINKS(nothing_to_lend_means_bytes),
    ON_LINKS(an_unknown_lease_means_bytes),
    ON_LINKS(lent_memory_is_given_once),
    ON_LINKS(a_part_of_lent_memory_is_handed_over),
    ON_LINKS(limits_hold_for_lent_memory),
});

}  // namespace
}  // namespace telegrad::test

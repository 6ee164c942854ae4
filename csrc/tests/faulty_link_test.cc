// Links with fault rules (core/faults.h): what each action does to the messages of one end.
#include <bit>
#include <cstring>

#include "core/faults.h"
#include "tests/links.h"

namespace telegrad::test {
namespace {

constexpr std::uint32_t kRequests = 1u << static_cast<int>(FrameType::kRequest);
constexpr const char* kTransports[] = {"shm", "unix", "tcp", "inproc"};
constexpr const char* kStreams[] = {"unix", "tcp"};

/// Two ends, of which `a` applies rules.
struct FaultyEnds {
  explicit FaultyEnds(const std::string& scheme) : ends(scheme), a(add_faults(std::move(ends.a), faults)) {
    a->set_peer_name("w1");
  }

  void add(FaultAction action, std::uint64_t nth = 1, Nanos delay = 0, bool body = false) {
    faults->add({.id = faults->applied().size(),
                 .action = action,
                 .destination = "w1",
                 .types = kRequests,
                 .nth = nth,
                 .delay = delay,
                 .body = body});
  }

  FaultsPtr faults = std::make_shared<Faults>("w0", 3);
  Ends ends;
  std::unique_ptr<Link> a;
  Random random{5};
  RecordingInbox inbox;

  Message message(std::size_t body = 10, const std::vector<std::size_t>& segments = {}) {
    Message m = random_message(random, body, segments);
    m.header.type = FrameType::kRequest;
    return m;
  }
  Link& b() { return *ends.b; }
};

void on_each(void (*run)(FaultyEnds&)) {
  for (const char* scheme : kTransports) {
    FaultyEnds e(scheme);
    run(e);
  }
}

CASE(messages_without_a_rule_are_unchanged) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kCut, 100);
    for (std::size_t size : {0, 1, 5000}) {
      const Message m = e.message(size, {size, 3 * size});
      e.inbox.messages.clear();
      send_whole(*e.a, m, e.b(), e.inbox);
      receive_until(e.b(), e.inbox, 1);
      check_same(m, e.inbox.messages[0]);
    }
    CHECK(e.faults->applied().empty());
  });
}

CASE(a_dropped_message_ends_the_link_behind_earlier_ones) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kDrop, 2);
    const Message first = e.message(), second = e.message(), third = e.message();
    Outgoing o1 = first.outgoing(), o2 = second.outgoing(), o3 = third.outgoing();
    CHECK(e.a->send(o1) == SendState::kSent);
    CHECK(e.a->send(o2) == SendState::kSent);
    CHECK(e.a->send(o3) == SendState::kBroken);
    receive_until_broken(e.b(), e.inbox);
    CHECK_EQ(e.inbox.messages.size(), 1u);
    check_same(first, e.inbox.messages[0]);
    receive_until_broken(*e.a, e.inbox);
    CHECK(e.a->error().text.starts_with("fault rule 0 has dropped a message"));
    CHECK_EQ(e.a->error().code, ECONNABORTED);
  });
}

CASE(a_dropped_message_keeps_no_lease) {
  FaultyEnds e("shm");
  e.add(FaultAction::kDrop);
  std::optional<LinkLease> lease;
  for (int turn = 0; turn < 20 && !(lease = e.a->lease(kMiB)); ++turn) {
    receive(e.b(), e.inbox, kAnyBudget);
    receive(*e.a, e.inbox, kAnyBudget);
  }
  CHECK(lease.has_value());
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({lease->memory->data(), kMiB, lease->lease});
  CHECK(e.a->send(m) == SendState::kSent);
  const std::byte* const place = lease->memory->data();
  lease.reset();
  const auto again = e.a->lease(kMiB);
  CHECK(again.has_value());
  CHECK(again->memory->data() == place);
}

CASE(a_cut_link_sends_nothing) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kCut);
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kBroken);
    receive_until_broken(e.b(), e.inbox);
    CHECK(e.inbox.messages.empty());
  });
}

CASE(a_held_message_goes_on_after_its_release) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kDelay);
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kBlocked);
    CHECK(!e.a->waits_for_fd());
    CHECK(e.a->send(o) == SendState::kBlocked);
    CHECK(!readable(e.a->lanes_fd(), 0));
    e.faults->release();
    CHECK(readable(e.a->lanes_fd()));
    e.a->poll_lanes();
    CHECK(!readable(e.a->lanes_fd(), 0));
    CHECK(e.a->send(o) == SendState::kSent);
    receive_until(e.b(), e.inbox, 1);
    check_same(m, e.inbox.messages[0]);
    CHECK_EQ(e.faults->applied().size(), 1u);
  });
}

CASE(a_delay_ends_after_its_time) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kDelay, 1, 20 * kMillisecond);
    const Nanos start = now();
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kBlocked);
    CHECK(readable(e.a->lanes_fd()));
    CHECK(now() - start >= 20 * kMillisecond);
    CHECK(e.a->send(o) == SendState::kSent);
  });
}

CASE(a_reordered_message_follows_the_next_one) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kReorder);
    const Message first = e.message(), second = e.message();
    Outgoing o1 = first.outgoing(), o2 = second.outgoing();
    CHECK(e.a->send(o1) == SendState::kSent);
    CHECK(e.a->send(o2) == SendState::kSent);
    receive_until(e.b(), e.inbox, 2);
    check_same(second, e.inbox.messages[0]);
    check_same(first, e.inbox.messages[1]);
  });
}

CASE(a_reordered_message_does_not_wait_forever) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kReorder);
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kSent);
    CHECK(readable(e.a->lanes_fd()));
    e.a->poll_lanes();
    CHECK(e.a->flush() == SendState::kSent);
    receive_until(e.b(), e.inbox, 1);
    check_same(m, e.inbox.messages[0]);
  });
}

CASE(a_duplicated_message_arrives_twice_with_one_credit) {
  on_each([](FaultyEnds& e) {
    e.add(FaultAction::kDuplicate);
    Message m = e.message();
    m.header.credit = 40;
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kSent);
    receive_until(e.b(), e.inbox, 2);
    CHECK_EQ(e.inbox.messages[0].header.credit, 40u);
    CHECK_EQ(e.inbox.messages[1].header.credit, 0u);
    CHECK(e.inbox.messages[0].body_view() == e.inbox.messages[1].body_view());
  });
}

CASE(a_corrupted_header_breaks_the_receiver) {
  for (const char* scheme : kStreams) {
    FaultyEnds e(scheme);
    e.add(FaultAction::kCorrupt);
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kSent);
    receive_until_broken(e.b(), e.inbox);
    CHECK(e.inbox.messages.empty());
    CHECK_EQ(e.b().error().text, std::string("received bytes that are not a Telegrad frame"));
  }
}

CASE(a_corrupted_payload_differs_in_one_bit) {
  for (const char* scheme : kStreams) {
    for (const bool in_body : {true, false}) {
      FaultyEnds e(scheme);
      e.add(FaultAction::kCorrupt, 1, 0, true);
      const Message m = in_body ? e.message(100) : e.message(0, {0, 100});
      send_whole(*e.a, m, e.b(), e.inbox);
      receive_until(e.b(), e.inbox, 1);
      const Incoming& got = e.inbox.messages[0];
      const std::string& sent = in_body ? m.body : m.segments[1];
      const auto* bytes = reinterpret_cast<const unsigned char*>(in_body ? got.body->data() : got.segments[1]->data());
      int bits = 0;
      for (std::size_t i = 0; i < sent.size(); ++i)
        bits += std::popcount(static_cast<unsigned char>(bytes[i] ^ sent[i]));
      CHECK_EQ(bits, 1);
    }
  }
}

CASE(links_without_bytes_are_cut_instead_of_corrupted) {
  for (const char* scheme : {"shm", "inproc"}) {
    FaultyEnds e(scheme);
    e.add(FaultAction::kCorrupt);
    const Message m = e.message();
    Outgoing o = m.outgoing();
    CHECK(e.a->send(o) == SendState::kBroken);
    CHECK(e.a->error().text.starts_with("a fault rule could not corrupt a message"));
  }
}

}  // namespace
}  // namespace telegrad::test

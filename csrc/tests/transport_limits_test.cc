// Conformance suite of the transport contract (core/transport.h): size limits, and a lack of memory.
#include "tests/transport_suite.h"

namespace telegrad::test {
namespace {

void refuses(Scheme scheme, const Limits& limits, const Message& message) {
  Ends e(scheme);
  RecordingInbox inbox;
  e.b->set_limits(limits);
  Outgoing out = message.outgoing();
  CHECK(e.a->send(out) == SendState::kSent);
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.allocations, 0);
  CHECK(inbox.messages.empty());
  CHECK_SAYS(e.b->error().text, "limit");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK_SAYS(e.b->error().text, "limit");
  CHECK_EQ(e.b->error().code, EPROTO);
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
    CHECK_SAYS(e.b->error().text, "memory");
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

const bool registered = add_on_every_scheme({
    ON_LINKS(limits_are_checked_before_memory_is_taken),
    ON_LINKS(a_frame_over_the_limits_spares_those_before_it),
    ON_LINKS(limits_change_from_inside_deliver),
    ON_LINKS(no_memory_costs_the_content_of_one_message),
    ON_LINKS(no_memory_for_what_must_arrive_breaks_the_link),
    ON_LINKS(a_trailer_has_a_limit_of_its_own),
});

}  // namespace
}  // namespace telegrad::test

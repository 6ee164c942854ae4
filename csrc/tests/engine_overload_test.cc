// Limits of what a worker keeps at the same time: what happens at each, at the sender and against a hostile peer.
#include "core/left_out.h"
#include "tests/overload_helpers.h"

namespace telegrad::test {
namespace {

// ---- the depth of nested calls

CASE_ON_EVERY_SCHEME(a_call_that_is_nested_too_deeply_fails) {
  Worker a(0, with_depth(5)), b(1);
  introduce({&a, &b}, scheme);
  CHECK_EQ(body_of(a.call(1, {.body = "x", .nested = true, .depth = 5})), "x");
  check_overloaded(a.call(1, {.nested = true, .depth = 6}), "max_call_depth");
  a.start(1, 1, {.nested = true, .depth = 6});
  a.completion_count.wait_for(1);
  check_overloaded(a.completions.at(1), "max_call_depth");
  CHECK_EQ(b.handled.value(), 1);
  CHECK_EQ(limit(a, "max_call_depth").refused, 2u);
  CHECK_EQ(limit(a, "max_call_depth").limit, 5u);
}

CASE(the_depth_travels_with_the_request) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  b.on_custom = [&](WorkItem& item) {
    CHECK_EQ(item.message.header.depth, 7u);
    CHECK_EQ(limit(b, "max_call_depth").used, 7u);
    b.answer(item, "seen");
  };
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .nested = true, .depth = 7})), "seen");
}

/// The callee trusts no caller: it answers without running the request. A creation runs, because others count on it.
CASE_ON_EVERY_SCHEME(the_callee_checks_the_depth) {
  Worker a(0), b(1, with_depth(5));
  introduce({&a, &b}, scheme);
  const Completion o = a.call(1, {.nested = true, .depth = 6});
  CHECK(o.reply.header.flags & kLeftOut);
  CHECK_EQ(body_of(o).front(), static_cast<char>(LeftOut::kOverloaded));
  CHECK_SAYS(body_of(o), "max_call_depth: ");
  CHECK_EQ(b.handled.value(), 0);
  CHECK_EQ(body_of(a.call(1, {.body = "x", .nested = true, .depth = 6, .flags = kMustDeliver | kMustRun})), "x");
}

/// The callee counts on its trailer, and answers it though all handlers are busy.
CASE(a_request_with_a_trailer_is_sent_without_its_content) {
  Settings one;
  one.handlers = 1;
  Worker a(0, with_depth(5)), b(1, one);
  introduce({&a, &b}, "unix");
  a.start(1, 1, {.tag = kHold, .body = "held"});
  b.handled.wait_for(1);
  b.on_custom = [&](WorkItem& item) {
    CHECK(item.message.header.flags & kLeftOut);
    CHECK_EQ(text_of(item.message.segments.at(0)), "the trailer");
    b.answer(item, std::string(item.message.body_view()));
  };
  const std::string body = body_of(a.call(
      1,
      {.tag = kCustom, .body = "content", .segments = {"the trailer"}, .depth = 6, .flags = kMustDeliver | kTrailer}));
  CHECK_EQ(body.front(), static_cast<char>(LeftOut::kOverloaded));
  CHECK_SAYS(body, "max_call_depth: ");
}

// ---- requests without a reply

CASE_ON_EVERY_SCHEME(a_caller_waits_while_too_many_requests_have_no_reply) {
  for (const bool at_caller : {true, false}) {  // the less of both limits counts
    Worker a(0, with_requests(at_caller ? 3 : 100), 4), b(1, with_requests(at_caller ? 100 : 3), 8);
    introduce({&a, &b}, scheme);
    CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    for (int i = 0; i < 3; ++i) a.start(1, i, {.tag = kHold, .body = "held"});
    b.handled.wait_for(4);  // they run, so the window of bytes is open
    CHECK(!a.engine->may_send_now(1, 1));
    CHECK_EQ(limit(a, "max_in_flight").used, 3u);
    a.start(1, 10, {.nested = true});
    a.start(1, 11, {.never_wait = true});
    a.completion_count.wait_for(2);
    check_overloaded(a.completions.at(10), "max_in_flight");
    check_overloaded(a.completions.at(11), "max_in_flight");
    CHECK(a.call(1, {.timeout = 5 * kMillisecond}).status == CallStatus::kTimedOut);
    CHECK_EQ(b.handled.value(), 4);
    Event sent;
    std::thread caller([&] {
      CHECK_EQ(body_of(a.call(1, {.body = "later"})), "later");
      sent.set();
    });
    while (a.engine->stats().pending_calls < 4) std::this_thread::yield();
    CHECK(!sent.is_set());
    b.release.set();
    caller.join();
    CHECK_EQ(limit(a, "max_in_flight").refused, 2u);
    CHECK(a.engine->may_send_now(1, 1));
  }
}

CASE(many_callers_share_a_few_requests) {
  Worker a(0, with_requests(2), 4), b(1, with_requests(2), 4);
  introduce({&a, &b}, "shm");
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < times(500); ++i) {
        if (i % 2) {
          CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
        } else {
          a.start(1, t * 10'000 + i, {.body = "x"});
        }
      }
    });
  }
  for (auto& c : callers) c.join();
  a.completion_count.wait_for(4 * ((times(500) + 1) / 2));
  CHECK_EQ(limit(a, "max_in_flight").used, 0u);
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
}

Message request(std::uint64_t call, Tag tag = kNoAnswer) {
  Message m = message(FrameType::kRequest, {}, call);
  m.header.tag = tag;
  return m;
}

CASE(a_peer_with_far_more_requests_is_disconnected) {
  constexpr int kMost = 2 * 10 + kHardRequests;
  Worker b(1, with_requests(10));
  b.listen("unix");
  Puppet p(0);
  p.connect(b.address());
  for (std::uint64_t i = 1; i <= 3000; ++i) {  // replies free their requests
    p.send(request(i, kEcho));
    p.receive();
  }
  for (std::uint64_t i = 1; i <= kMost; ++i) p.send(request(3000 + i));
  b.handled.wait_for(3000 + kMost);
  CHECK_EQ(b.event_count.value(), 0);
  p.send(request(9999));
  CHECK_SAYS(b.wait_for_event(EventKind::kPeerLost), "max_in_flight: 10");
  p.wait_for_end();
  CHECK_EQ(b.handled.value(), 3000 + kMost);
  CHECK_EQ(limit(b, "max_in_flight").refused, 1u);
}

// ---- send queues

/// A worker with a small send queue and a puppet that does not read.
struct Slow {
  explicit Slow(std::uint64_t send_queue) : a(0, with_load({.send_queue = send_queue})), p(1) { p.meet(a); }
  Worker a;
  Puppet p;
};

CASE(a_call_over_the_send_queue_fails_and_the_session_goes_on) {
  Slow s(1 << 20);
  int sent = 0;
  while (s.a.completion_count.value() == 0) {
    s.a.start(1, ++sent, {.body = std::string(kLarge, 'x'), .never_wait = true});
    CHECK(sent < 100);
    if (limit(s.a, "send_queue_bytes").refused > 0) s.a.completion_count.wait_for(1);
  }
  check_overloaded(s.a.completions.at(sent), "send_queue_bytes");
  CHECK(limit(s.a, "send_queue_bytes").used <= (1 << 20));
  for (int i = 1; i < sent; ++i) s.p.reply(s.p.receive(), "read");
  s.a.completion_count.wait_for(sent);
  CHECK_EQ(limit(s.a, "send_queue_bytes").used, 0u);
  s.a.start(1, 1000, {.body = "y", .never_wait = true});
  s.p.reply(s.p.receive(), "goes on");
  s.a.completion_count.wait_for(sent + 1);
  CHECK_EQ(body_of(s.a.completions.at(1000)), "goes on");
}

/// Memory of callers that wait until it is sent costs the queue nothing.
CASE(callers_that_wait_do_not_fill_the_send_queue) {
  Slow s(1 << 20);
  std::vector<std::thread> callers;
  for (int i = 1; i <= 4; ++i) {
    callers.emplace_back([&, i] { s.a.start(1, i, {.segments = {std::string(8 << 20, 'x')}, .nested = true}); });
  }
  for (int i = 0; i < 4; ++i) s.p.reply(s.p.receive(), "read");
  for (auto& c : callers) c.join();
  s.a.completion_count.wait_for(4);
  CHECK_EQ(limit(s.a, "send_queue_bytes").refused, 0u);
}

CASE(large_replies_over_the_send_queue_lose_their_content) {
  Worker a(0, with_load({.send_queue = 1 << 20}));
  a.listen("unix");
  std::vector<std::pair<std::uint64_t, std::uint64_t>> asked;
  Counter arrived;
  a.on_custom = [&](WorkItem& item) {
    asked.emplace_back(item.connection, item.message.header.call_id);
    arrived.add();
  };
  Puppet p(1);
  p.connect(a.address());
  constexpr int kReplies = 20;
  for (std::uint64_t i = 1; i <= kReplies; ++i) {
    p.send(request(i, kCustom));
    arrived.wait_for(static_cast<int>(i));
  }
  for (const auto& [connection, call] : asked) {  // not a thread of the pool: never waits
    Request r{.body = std::string(kLarge, 'x')};
    CHECK(a.engine->reply(connection, call, compose(r), true));
  }
  int whole = 0, left_out = 0;
  for (int i = 0; i < kReplies; ++i) {
    const Incoming reply = p.receive();
    if (!(reply.header.flags & kLeftOut)) {
      ++whole;
      continue;
    }
    ++left_out;
    CHECK_EQ(reply.body_view().front(), static_cast<char>(LeftOut::kOverloaded));
    CHECK_SAYS(std::string(reply.body_view()), "send_queue_bytes: ");
  }
  CHECK(whole >= 1 && left_out >= 10);
  CHECK_EQ(a.event_count.value(), 0);
}

/// Messages that are never left out may pass the limit, but not by far.
CASE(a_peer_that_never_reads_is_disconnected) {
  Slow s(1);
  const auto small = [] {
    Request r{.body = std::string(60 << 10, 'x')};
    return compose(r);
  };
  for (int i = 0; i < 1000; ++i) CHECK(s.a.engine->send(1, small()));  // 60 MB
  CHECK_EQ(s.a.event_count.value(), 0);
  for (int i = 0; i < 300; ++i) s.a.engine->send(1, small());
  CHECK_SAYS(s.a.wait_for_event(EventKind::kPeerLost), "send_queue_bytes: 1");
}

// ---- names

CASE_ON_EVERY_SCHEME(names_beyond_those_that_a_peer_keeps_travel_with_each_message) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  b.on_custom = [&](WorkItem& item) { b.answer(item, item.name ? item.name->text : "none"); };
  const auto call = [&](std::uint32_t id, const std::string& name) {
    return body_of(a.call(1, {.tag = kCustom, .name_id = id, .name = name}));
  };
  for (int round = 0; round < 3; ++round) {
    CHECK_EQ(call(5, "known"), "known");
    CHECK_EQ(call(kMaxNames + 7, "further"), "further");
    CHECK_EQ(call(kMaxNames + 8, "another"), "another");
  }
}

CASE(the_bytes_of_names_are_limited_too) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  b.on_custom = [&](WorkItem& item) { b.answer(item, item.name ? item.name->text.substr(0, 8) : "none"); };
  const std::string rest(60 << 10, 'n');
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t id = 1; id <= 400; ++id) {  // 24 MB
      const std::string name = std::to_string(10'000'000 + id);
      CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .name_id = id, .name = name + rest})), name);
    }
  }
  CHECK_EQ(a.event_count.value() + b.event_count.value(), 0);
}

CASE(a_peer_that_defines_too_many_names_is_disconnected) {
  for (const bool bytes : {true, false}) {
    Worker b(1);
    b.listen("unix");
    Puppet p(0);
    p.connect(b.address());
    const std::string text(bytes ? 65'000 : 1, 'n');
    const std::uint32_t most = bytes ? 259 : 1;  // 16.8 MB
    for (std::uint32_t i = 0; i < most; ++i) {
      Message m = request(i + 1, kEcho);
      m.header.name_id = bytes ? i + 1 : kTransientName;
      m.name = text;
      p.send(m);
      p.receive();
    }
    Message m = request(9999, kEcho);
    m.header.name_id = bytes ? 5000 : kTransientName + 1;
    m.name = text;
    p.send(m);
    CHECK_SAYS(b.wait_for_event(EventKind::kPeerLost), "more than 65536 names");
  }
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test

// Cancellation: by the caller, by a deadline, and by the loss of the caller.
#include "tests/workers.h"

namespace telegrad::test {
namespace {

Settings one_handler() {
  Settings s;
  s.handlers = 1;
  return s;
}

/// Cancels a call and returns its completion, which no thread waits for.
Completion cancel(Worker& w, std::uint64_t call) {
  WorkItem taken;
  CHECK(w.engine->cancel(call, taken));
  CHECK(taken.target);
  return taken.take_completion();
}

/// Waits until a worker has no request without a reply.
void wait_until_quiet(Worker& w) {
  while (true) {
    const EngineStats s = w.engine->stats();
    if (s.queued_requests + s.running_requests + s.detached_requests == 0) return;
    std::this_thread::yield();
  }
}

/// Makes a request and detaches it at the callee, which returns from its handler without a reply.
WorkItem detached(Worker& a, Worker& b, int target, bool deferred, std::uint64_t& call) {
  WorkItem kept;
  Event taken;
  {
    std::lock_guard lock(b.mutex);
    b.on_custom = [&](WorkItem& item) {
      CHECK(!b.engine->detach(item.connection, item.message.header.call_id, deferred));
      kept = std::move(item);
      taken.set();
    };
  }
  call = a.start(1, target, {.tag = kCustom});
  taken.wait();
  return kept;
}

bool is_canceled(Worker& w, const WorkItem& item) {
  return w.engine->is_canceled(item.connection, item.message.header.call_id);
}

CASE_ON_EVERY_SCHEME(a_queued_request_does_not_run) {
  Worker a(0), b(1, one_handler());
  introduce({&a, &b}, scheme);
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  const std::uint64_t call = a.start(1, 1, {.body = std::string(1000, 'x'), .segments = {std::string(100'000, 'y')}});
  while (b.engine->stats().queued_requests == 0) std::this_thread::yield();
  CHECK(cancel(a, call).status == CallStatus::kCanceled);
  b.left_out.wait_for(1);  // at once, although the only handler is busy
  CHECK_EQ(b.handled.value(), 1);
  b.release.set();
  a.completion_count.wait_for(1);
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
  wait_until_quiet(b);
}

CASE_ON_EVERY_SCHEME(a_running_request_can_ask) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  Event running;
  b.on_custom = [&](WorkItem& item) {
    CHECK(!is_canceled(b, item));
    running.set();
    while (!is_canceled(b, item)) std::this_thread::yield();
    b.answer(item, "late");
    CHECK(!is_canceled(b, item));  // it has been answered
  };
  const std::uint64_t call = a.start(1, 1, {.tag = kCustom});
  running.wait();
  CHECK(cancel(a, call).status == CallStatus::kCanceled);
  wait_until_quiet(b);
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(a.completion_count.value(), 0);  // the late reply is dropped
}

CASE_ON_EVERY_SCHEME(a_request_with_a_deferred_result_is_reported_once) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  std::uint64_t call;
  const WorkItem item = detached(a, b, 1, true, call);
  CHECK_EQ(b.engine->stats().detached_requests, 1u);
  cancel(a, call);
  b.cancel_count.wait_for(1);
  CHECK_EQ(b.canceled[0], item.message.header.call_id);
  CHECK(is_canceled(b, item));
  b.answer(item, "late");
  CHECK(!is_canceled(b, item));
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(b.cancel_count.value(), 1);
  wait_until_quiet(b);
}

CASE_ON_EVERY_SCHEME(a_parked_request_is_marked) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  std::uint64_t call;
  const WorkItem item = detached(a, b, 1, false, call);
  cancel(a, call);
  while (!is_canceled(b, item)) std::this_thread::yield();
  CHECK(b.engine->detach(item.connection, item.message.header.call_id, true));  // as it is resumed
  b.answer(item, "late");
  wait_until_quiet(b);
  CHECK_EQ(b.cancel_count.value(), 0);
}

CASE_ON_EVERY_SCHEME(a_lost_caller_cancels_its_requests) {
  Worker b(1, one_handler());
  std::vector<WorkItem> kept(2);
  Event running, deferred;
  bool gone = false;
  b.listen(scheme);
  {
    Worker a(0);
    a.meet(b);
    b.on_custom = [&](WorkItem& item) {
      const std::string body(item.message.body_view());
      if (body == "defer") {
        b.engine->detach(item.connection, item.message.header.call_id, true);
        kept[0] = std::move(item);
        return deferred.set();
      }
      running.set();
      while (!is_canceled(b, item)) std::this_thread::yield();
      gone = true;
      b.answer(item, "nowhere");
    };
    a.start(1, 0, {.tag = kCustom, .body = "defer"});
    deferred.wait();
    a.start(1, 1, {.tag = kCustom, .body = "run"});
    running.wait();
    a.start(1, 2, {.body = "queued"});
    a.start(1, 3, {.body = "must run", .flags = kMustRun});
    while (b.engine->stats().queued_requests < 2) std::this_thread::yield();
  }
  b.left_out.wait_for(1);
  b.cancel_count.wait_for(1);
  b.answer(kept[0], "nowhere");
  b.handled.wait_for(3);
  wait_until_quiet(b);
  CHECK(gone);
  CHECK_EQ(b.left_out.value(), 1);
}

CASE_ON_EVERY_SCHEME(an_expired_request_does_not_run) {
  Worker a(0), b(1, one_handler());
  introduce({&a, &b}, scheme);
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  const Completion o = a.call(1, {.timeout = 5 * kMillisecond});
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "queued");
  b.left_out.wait_for(1);
  const Completion pooled = [&] {
    a.start(1, 1, {.timeout = 5 * kMillisecond});
    a.completion_count.wait_for(1);
    return std::move(a.completions.at(1));
  }();
  CHECK(pooled.status == CallStatus::kTimedOut);
  CHECK_EQ(pooled.why, "queued");
  b.left_out.wait_for(2);
  b.release.set();
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(b.handled.value(), 2);
}

CASE_ON_EVERY_SCHEME(a_timeout_says_how_far_the_call_has_come) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  CHECK_EQ(body_of(a.call(1, {.body = "connect"})), "connect");
  Completion o = a.call(1, {.tag = kHold, .timeout = 5 * kMillisecond});
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "running");
  std::uint64_t call;
  const WorkItem item = detached(a, b, 1, false, call);
  cancel(a, call);
  b.answer(item, "");
  o = a.call(2, {.timeout = kMillisecond});
  CHECK(o.status == CallStatus::kUnreachable);
}

/// A worker with threads and a puppet at the other end: callee or caller.
struct WithPuppet {
  explicit WithPuppet(bool connects) : a(0, one_handler()), p(1) {
    if (connects) {
      a.listen("unix");
      p.connect(a.address());
    } else {
      a.engine->set_peer(p.address());
      std::thread puppet([&] { p.accept(); });
      a.start(1, 0, {});
      puppet.join();
      p.reply(p.receive(), "hello");
      a.completion_count.wait_for(1);
    }
  }
  Incoming expect(FrameType type) {
    Incoming m = p.receive();
    CHECK(m.header.type == type);
    return m;
  }
  void send(FrameType type, std::uint64_t call, std::uint8_t tag, std::string body = {}) {
    Message m = message(type, std::move(body), call);
    m.header.tag = tag;
    p.send(m);
  }
  Worker a;
  Puppet p;
};

CASE(the_callee_reports_each_state) {
  WithPuppet s(true);
  const auto state_of = [&](std::uint64_t call) {
    s.send(FrameType::kCancel, call, static_cast<std::uint8_t>(CancelReason::kExpired));
    Incoming m = s.p.receive();
    while (m.header.type != FrameType::kCallState) m = s.p.receive();  // replies of canceled requests
    CHECK_EQ(m.header.call_id, call);
    return static_cast<CallState>(m.header.tag);
  };
  s.send(FrameType::kRequest, 7, kHold);
  s.a.handled.wait_for(1);
  s.send(FrameType::kRequest, 8, kEcho, "queued");
  CHECK(state_of(8) == CallState::kQueued);
  CHECK(state_of(7) == CallState::kRunning);
  s.a.release.set();
  while (s.p.receive().header.call_id != 7) {
  }
  CHECK(state_of(7) == CallState::kReplied);
  CHECK(state_of(1234) == CallState::kReplied);  // it never existed
  s.send(FrameType::kCancel, 7, static_cast<std::uint8_t>(CancelReason::kCanceled));
  s.send(FrameType::kCancel, 0, 200);
  s.send(FrameType::kRequest, 9, kEcho, "still here");
  CHECK_EQ(std::string(s.expect(FrameType::kReply).body_view()), "still here");
}

CASE(without_an_answer_the_state_is_unknown) {
  WithPuppet s(false);
  const Nanos start = now();
  std::thread puppet([&] {
    const Incoming request = s.expect(FrameType::kRequest);
    const Incoming cancel = s.expect(FrameType::kCancel);
    CHECK_EQ(cancel.header.call_id, request.header.call_id);
    CHECK_EQ(cancel.header.tag, static_cast<std::uint8_t>(CancelReason::kExpired));
  });
  const Completion o = s.a.call(1, {.timeout = 5 * kMillisecond});
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "unknown");
  CHECK(now() - start >= 25 * kMillisecond);
  puppet.join();
  s.a.start(1, 1, {.timeout = 5 * kMillisecond});
  s.a.completion_count.wait_for(2);
  CHECK_EQ(s.a.completions.at(1).why, "unknown");
}

CASE(a_state_that_does_not_exist_is_unknown) {
  WithPuppet s(false);
  s.a.start(1, 1, {.timeout = 5 * kMillisecond});
  s.expect(FrameType::kRequest);
  const std::uint64_t call = s.expect(FrameType::kCancel).header.call_id;
  s.send(FrameType::kCallState, call + 1, 1);  // of no call
  s.send(FrameType::kCallState, call, 99);
  s.a.completion_count.wait_for(2);
  CHECK_EQ(s.a.completions.at(1).why, "unknown");
  s.send(FrameType::kCallState, call, 3);  // too late
}

/// The caller may notice later than its callee that the deadline has passed.
CASE(a_reply_that_the_deadline_has_passed_is_a_timeout) {
  WithPuppet s(false);
  s.a.start(1, 1, {.body = "x"});
  s.p.reply(s.expect(FrameType::kRequest), "E", kLeftOut | kMustDeliver);
  s.a.completion_count.wait_for(3);  // with the reply, which must be processed
  CHECK(s.a.completions.at(1).status == CallStatus::kTimedOut);
  CHECK_EQ(s.a.completions.at(1).why, "queued");
  CHECK_EQ(body_of(s.a.orphans.at(0)), "E");
}

/// Requests that are canceled together are answered at once, by threads that have just run nested ones.
CASE_ON_EVERY_SCHEME(a_reply_does_not_overtake_the_state_of_its_request) {
  Worker a(0), b(1, one_handler(), 4), c(2);
  introduce({&a, &b, &c}, scheme);
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  std::atomic<bool> ended = false;
  std::thread other([&] {
    for (int i = 0; !ended; ++i) {
      c.start(1, i, {.nested = true});
      if (i % 20 == 0) c.call(1, {.nested = true});
    }
  });
  constexpr int kCalls = 1000;
  const Nanos deadline = now() + 100 * kMillisecond;
  for (int i = 1; i <= kCalls; ++i)
    a.start(1, i, {.body = "x", .timeout = std::max<Nanos>(deadline - now(), 1), .never_wait = true});
  a.completion_count.wait_for(kCalls);
  ended = true;
  other.join();
  b.release.set();
  std::lock_guard lock(a.mutex);
  for (int i = 1; i <= kCalls; ++i) CHECK(a.completions.at(i).why != "reply lost");
}

CASE(a_reply_after_the_deadline_is_a_lost_reply) {
  WithPuppet s(false);
  std::thread puppet([&] {
    const Incoming request = s.expect(FrameType::kRequest);
    s.expect(FrameType::kCancel);
    s.p.reply(request, "late", kMustDeliver);
  });
  const Completion o = s.a.call(1, {.timeout = 5 * kMillisecond});
  puppet.join();
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "reply lost");
  s.a.completion_count.wait_for(2);
  CHECK_EQ(body_of(s.a.orphans.at(0)), "late");  // its references are processed
}

CASE(a_call_that_waits_for_a_connection_is_never_sent) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  const std::uint64_t first = a.start(1, 1, {.body = "canceled", .segments = {"lent"}, .never_wait = true});
  a.start(1, 3, {.body = "wanted"});
  CHECK(cancel(a, first).status == CallStatus::kCanceled);
  WorkItem none;
  CHECK(!a.engine->cancel(first, none));
  p.accept();
  CHECK_EQ(std::string(p.receive().body_view()), "wanted");
  CHECK_EQ(a.engine->stats().pending_calls, 1u);
}

/// Flags of requests that are sent although their callers have given up, and whether they keep their content.
constexpr struct {
  std::uint16_t flags;
  bool keeps;
} kSentAnyway[] = {{kMustDeliver | kTrailer, false},  // the trailer has what the peer counts
                   {kMustDeliver, true},
                   {kMustDeliver | kMustRun, true},
                   {kMustDeliver | kMustRun | kTrailer, true}};

CASE(a_canceled_request_that_must_be_delivered_keeps_what_its_peer_needs) {
  for (const auto [flags, keeps] : kSentAnyway) {
    Event gone;
    Worker a(0);
    Puppet p(1);
    a.engine->set_peer(p.address());
    Request r{.body = "body", .segments = {"segment", "trailer"}, .never_wait = true, .flags = flags};
    r.keep_alive = std::make_unique<Bytes>("", std::vector<std::string>{}, [&] { gone.set(); });
    cancel(a, a.start(1, 1, std::move(r)));
    p.accept();
    const Incoming m = p.receive();
    CHECK_EQ((m.header.flags & kLeftOut) == 0, keeps);
    CHECK_EQ(std::string(m.body_view()), keeps ? "body" : "C");
    CHECK_EQ(m.segments.size(), keeps ? 2u : 1u);
    CHECK_EQ(text_of(m.segments.back()), "trailer");
    CHECK(!gone.is_set());
    p.reply(m, "late");
    gone.wait();
  }
}

CASE(a_queued_request_that_must_be_delivered_keeps_what_its_worker_needs) {
  for (const bool expires : {true, false}) {
    Worker a(0), b(1, one_handler());
    introduce({&a, &b}, "unix");
    a.start(1, 0, {.tag = kHold});
    b.handled.wait_for(1);
    int kept = 0;
    for (const auto [flags, keeps] : kSentAnyway) {
      kept += keeps;
      Request r{.body = "body", .segments = {"trailer"}, .timeout = expires ? 5 * kMillisecond : 0, .flags = flags};
      if (expires) {
        CHECK_EQ(a.call(1, std::move(r)).why, "queued");
      } else {
        cancel(a, a.start(1, 1, std::move(r)));
      }
    }
    b.left_out.wait_for(1);
    CHECK_EQ(b.handled.value(), 1);
    b.release.set();
    b.handled.wait_for(1 + kept);
    wait_until_quiet(b);
    CHECK_EQ(b.left_out.value(), 1);
  }
}

CASE(a_call_that_never_got_a_connection_says_so) {
  Worker a(0);
  Puppet p(1);  // which accepts no connection
  a.engine->set_peer(p.address());
  const Completion o = a.call(1, {.timeout = 5 * kMillisecond});
  CHECK(o.status == CallStatus::kTimedOut);
  CHECK_EQ(o.why, "waiting");
}

CASE(a_waiting_thread_gets_the_cancellation) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const std::uint64_t call = a.start(1, 1, {.tag = kHold});
  b.handled.wait_for(1);
  Completion o;
  WaitEnd end{};
  std::thread waiter([&] { end = a.engine->wait(call, kNever, {}, o); });
  WorkItem taken;
  CHECK(a.engine->cancel(call, taken));
  waiter.join();
  if (taken.target) {  // it was canceled before the thread waited
    CHECK(end == WaitEnd::kStopped);
    o = taken.take_completion();
  } else {
    CHECK(end == WaitEnd::kDone);
  }
  CHECK(o.status == CallStatus::kCanceled);
  b.release.set();
  CHECK(!a.engine->cancel(call, taken));
}

CASE(an_abandoned_call_is_canceled) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  Event running, canceled;
  b.on_custom = [&](WorkItem& item) {
    running.set();
    while (!is_canceled(b, item)) std::this_thread::yield();
    canceled.set();
    b.answer(item, "");
  };
  const std::uint64_t call = a.start(1, -1, {.tag = kCustom});
  running.wait();
  a.engine->give_up(call);
  canceled.wait();
}

CASE(background_calls_are_not_canceled) {
  Worker a(0), b(1, one_handler());
  introduce({&a, &b}, "unix");
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  const std::uint64_t call = a.start(1, 1, {.timeout = 5 * kMillisecond, .background = true, .flags = kMustRun});
  WorkItem none;
  CHECK(!a.engine->cancel(call, none));
  a.completion_count.wait_for(1);
  CHECK_EQ(a.completions.at(1).why, "");
  b.release.set();
  b.handled.wait_for(2);
  CHECK_EQ(b.left_out.value(), 0);
}

CASE_ON_EVERY_SCHEME(cancellations_race_with_replies) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  int canceled = 0;
  constexpr int kCalls = 2000;
  for (int i = 0; i < kCalls; ++i) {
    const std::uint64_t call = a.start(1, i, {.body = "x"});
    for (int n = i % 50; n > 0; --n) std::this_thread::yield();
    WorkItem taken;
    if (!a.engine->cancel(call, taken)) continue;
    CHECK(taken.target && taken.status == CallStatus::kCanceled);
    ++canceled;
  }
  a.completion_count.wait_for(kCalls - canceled);
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
  wait_until_quiet(b);
}

CASE_ON_EVERY_SCHEME(many_queued_requests_are_canceled_in_few_passes) {
  Worker a(0), b(1, one_handler());
  introduce({&a, &b}, scheme);
  a.start(1, 0, {.tag = kHold});
  b.handled.wait_for(1);
  std::vector<std::uint64_t> calls;
  for (int i = 1; i <= 5000; ++i) calls.push_back(a.start(1, i, {.body = "x", .never_wait = true}));
  for (const std::uint64_t call : calls) cancel(a, call);
  b.left_out.wait_for(5000);
  CHECK_EQ(b.handled.value(), 1);
  b.release.set();
  wait_until_quiet(b);
}

}  // namespace
}  // namespace telegrad::test

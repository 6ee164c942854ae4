// Cancellation: by the caller, by a deadline, and by the loss of the caller.
#include <functional>

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

CASE_ON_EVERY_SCHEME(a_late_reply_is_no_result) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  WorkItem kept;
  Event detached;
  b.on_custom = [&](WorkItem& item) {
    const std::uint64_t call = item.message.header.call_id;
    if (item.message.body_view() == "defer") {
      b.engine->mark_late(item.connection, call);
      b.engine->detach(item.connection, call, true);
      kept = std::move(item);
      return detached.set();
    }
    b.engine->mark_late(item.connection, call);
    b.answer(item, "a part");
  };
  const Completion running = a.call(1, {.tag = kCustom});
  CHECK(running.status == CallStatus::kTimedOut);
  CHECK_EQ(running.why, "running");
  a.start(1, 1, {.tag = kCustom, .body = "defer"});
  detached.wait();
  b.answer(kept, "a part");
  a.completion_count.wait_for(1);
  CHECK(a.completions[1].status == CallStatus::kTimedOut);
  {
    std::lock_guard lock(b.mutex);
    b.on_custom = [&](WorkItem& item) { b.answer(item, "whole"); };
  }
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom})), "whole");
  wait_until_quiet(b);
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
  int expired = 0;
  const auto expire = [&](const std::function<Completion()>& call) {
    Completion o;
    do {  // a busy machine may not say in time how far the call has come
      o = call();
      CHECK(o.status == CallStatus::kTimedOut);
      b.left_out.wait_for(++expired);
    } while (o.why == "unknown");
    CHECK_EQ(o.why, "queued");
  };
  expire([&] { return a.call(1, {.timeout = 5 * kMillisecond}); });
  int pooled = 0;
  expire([&] {
    a.start(1, ++pooled, {.timeout = 5 * kMillisecond});
    a.completion_count.wait_for(pooled);
    return std::move(a.completions.at(pooled));
  });
  b.release.set();
  CHECK_EQ(body_of(a.call(1, {.body = "next"})), "next");
  CHECK_EQ(b.handled.value(), 2);
}

CASE_ON_EVERY_SCHEME(a_timeout_says_how_far_the_call_has_come) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  CHECK_EQ(body_of(a.call(1, {.body = "connect"})), "connect");
  Completion o;
  Nanos timeout = 5 * kMillisecond;
  do {  // a busy machine may take longer until it runs
    o = a.call(1, {.tag = kHold, .timeout = timeout});
    CHECK(o.status == CallStatus::kTimedOut);
    timeout *= 4;
  } while (o.why != "running" && timeout < 60 * kSecond);
  CHECK_EQ(o.why, "running");
  std::uint64_t call;
  const WorkItem item = detached(a, b, 1, false, call);
  cancel(a, call);
  b.answer(item, "");
  o = a.call(2, {.timeout = kMillisecond});
  CHECK(o.status == CallStatus::kUnreachable);
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

// The call table: where a completion goes, and how long a call keeps its object alive.
#include "core/call_table.h"

#include "core/call_options.h"
#include "core/engine_parts.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

struct Counted final : KeepAlive {
  explicit Counted(int& live) : live(live) { ++live; }
  ~Counted() override { --live; }
  int& live;
};

struct Calls {
  std::uint64_t open(bool is_async, Nanos deadline = kNever) {
    CallOptions options;
    options.deadline = deadline;
    options.keep_alive = std::make_unique<Counted>(live);
    if (is_async) options.target = std::make_unique<Counted>(targets);
    const std::uint64_t id = parts.calls.open(1, {}, 0, options);
    parts.calls.set_deadline(id, deadline);
    return id;
  }
  void complete(std::uint64_t id, CallStatus status) {
    Released released;
    parts.calls.complete(id, Completion{.status = status}, released);
  }
  /// Returns the status of the completion that the pool gets next; kPending if there is none.
  CallStatus pooled() {
    WorkItem item;
    parts.queue.enter(thread);
    return parts.queue.pop(thread, item) ? item.status : CallStatus::kPending;
  }

  int live = 0, targets = 0;
  EngineParts parts{Settings{}};
  PoolThread thread;
  Lock lock{parts.mutex};
};

CASE(a_completion_stays_with_a_call_until_a_thread_waits) {
  Calls c;
  const std::uint64_t id = c.open(false);
  c.complete(id, CallStatus::kPeerLost);
  c.complete(id, CallStatus::kTimedOut);  // only the first one counts
  CHECK_EQ(c.parts.calls.size(), 1u);
  c.lock.unlock();
  Completion completion;
  CHECK(c.parts.calls.wait(id, kNever, {}, completion) == WaitEnd::kDone);
  CHECK(completion.status == CallStatus::kPeerLost);
  CHECK(c.parts.calls.wait(id, kNever, {}, completion) == WaitEnd::kStopped);
  c.lock.lock();
  CHECK_EQ(c.parts.calls.size(), 0u);
  CHECK_EQ(c.live, 0);
}

CASE(an_asynchronous_call_completes_in_the_pool) {
  Calls c;
  const std::uint64_t id = c.open(true);
  c.complete(id, CallStatus::kPeerLost);
  CHECK_EQ(c.parts.calls.size(), 0u);
  CHECK(c.pooled() == CallStatus::kPeerLost);
  CHECK(c.pooled() == CallStatus::kPending);
  CHECK_EQ(c.targets, 0);
}

CASE(a_wait_set_gets_completions_before_the_pool) {
  Calls c;
  WaitSet set;
  set.calls = {c.open(true), c.open(true)};
  c.lock.unlock();
  CHECK(c.parts.calls.add_wait_set(set));
  c.lock.lock();
  CHECK_EQ(set.expected, 2u);
  c.complete(set.calls[0], CallStatus::kPeerLost);
  CHECK(c.pooled() == CallStatus::kPending);
  CHECK_EQ(set.completions.size(), 1u);
  c.lock.unlock();
  std::deque<WorkItem> left;
  c.parts.calls.remove_wait_set(set, left);  // the pool gets the rest
  c.lock.lock();
  CHECK(left.empty());
  CHECK(c.pooled() == CallStatus::kPeerLost);
  c.complete(set.calls[1], CallStatus::kUnreachable);
  CHECK(c.pooled() == CallStatus::kUnreachable);
}

CASE(calls_expire_in_the_order_of_their_deadlines) {
  Calls c;
  c.open(true, 20);
  c.open(true, 10);
  CHECK_EQ(c.parts.calls.next_deadline(), 10);
  Released released;
  std::vector<SentCall> expired;
  c.parts.calls.expire(10, released, expired);
  CHECK(expired.empty());  // the requests are on no connection: there is no callee to ask
  CHECK_EQ(c.parts.calls.next_deadline(), 20);
  CHECK(c.pooled() == CallStatus::kTimedOut);
  CHECK_EQ(c.parts.calls.size(), 1u);
  c.parts.calls.stop_all(released);
  CHECK(c.pooled() == CallStatus::kStopped);
}

CASE(an_object_is_kept_alive_while_a_late_reply_can_arrive) {
  Calls c;
  Released released;
  const std::uint64_t id = c.open(true);
  c.parts.calls.fail_calls_of(5, CallStatus::kPeerLost, "", released);
  CHECK(c.pooled() == CallStatus::kPending);  // the request is on no connection
  c.parts.calls.set_connection(id, 5);
  c.parts.calls.fail_calls_of(5, CallStatus::kPeerLost, "", released);
  CHECK(c.pooled() == CallStatus::kPeerLost);
  released.clear();
  CHECK_EQ(c.live, 0);  // the connection has closed
}

}  // namespace
}  // namespace telegrad::test

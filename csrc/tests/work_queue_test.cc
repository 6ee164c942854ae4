// The work queue: which items run, in which order, and when one more thread is needed.
#include "core/work_queue.h"

#include "core/engine_parts.h"
#include "core/take_if.h"
#include "tests/check.h"

namespace telegrad::test {
namespace {

struct Queue {
  explicit Queue(std::size_t handlers = 1) : parts(settings_of(handlers)), lock(parts.mutex) {}

  static Settings settings_of(std::size_t handlers) {
    Settings s;
    s.handlers = handlers;
    return s;
  }
  void push(WorkKind kind, std::int32_t number, std::uint16_t flags = 0) {
    WorkItem item;
    item.kind = kind;
    item.peer = number;
    item.message.header.flags = flags;
    parts.queue.push(std::move(item));
  }
  void push_event(EventKind kind, std::int32_t number) {
    WorkItem item;
    item.kind = WorkKind::kEvent;
    item.event = kind;
    item.peer = number;
    parts.queue.push_peer_event(std::move(item));
  }
  /// Returns the number of the next item for a thread; -1 if there is none.
  std::int32_t next(PoolThread& thread) {
    parts.queue.enter(thread);
    item = WorkItem();
    return parts.queue.pop(thread, item) ? item.peer : -1;
  }

  EngineParts parts;
  Lock lock;
  WorkItem item;
};

CASE(top_level_requests_run_on_a_limited_number_of_threads) {
  Queue q(1);
  PoolThread a, b;
  q.push(WorkKind::kRequest, 1);
  q.push(WorkKind::kRequest, 2);
  CHECK_EQ(q.next(a), 1);
  CHECK_EQ(q.next(b), -1);
  q.push(WorkKind::kRequest, 3, kNested);
  CHECK_EQ(q.next(b), 3);  // nested requests always find a thread
  CHECK_EQ(q.next(b), -1);
  CHECK_EQ(q.next(a), 2);
}

CASE(a_suspended_thread_does_not_count_as_running_a_request) {
  Queue q(1);
  PoolThread a, b;
  q.push(WorkKind::kRequest, 1);
  q.push(WorkKind::kRequest, 2);
  CHECK_EQ(q.next(a), 1);
  CHECK(q.parts.queue.suspend(a));
  CHECK(!q.parts.queue.suspend(a));
  CHECK_EQ(q.next(b), 2);
  q.parts.queue.resume(a);
  q.push(WorkKind::kRequest, 3);
  CHECK_EQ(q.next(b), -1);
}

CASE(completions_run_before_requests_and_deferred_ones_after_all) {
  Queue q;
  PoolThread a;
  WorkItem deferred;
  deferred.kind = WorkKind::kCompletion;
  deferred.peer = 9;
  q.parts.queue.defer(std::move(deferred));
  CHECK(q.parts.queue.has_deferred());
  q.push(WorkKind::kRequest, 1);
  q.push(WorkKind::kCompletion, 2);
  q.push(WorkKind::kRequest, 3, kNested);
  for (const std::int32_t number : {2, 3, 1, 9, -1}) CHECK_EQ(q.next(a), number);
}

CASE(one_thread_runs_completions_at_a_time) {
  Queue q;
  PoolThread a, b;
  q.push(WorkKind::kCompletion, 1);
  q.push(WorkKind::kCompletion, 2);
  CHECK_EQ(q.next(a), 1);
  CHECK(!q.parts.queue.has_work());
  CHECK_EQ(q.next(b), -1);
  CHECK_EQ(q.next(a), 2);
}

CASE(peer_events_run_one_at_a_time_and_in_order) {
  Queue q;
  PoolThread a, b;
  q.push_event(EventKind::kPeerLost, 1);
  q.push_event(EventKind::kPeerBack, 2);
  CHECK_EQ(q.next(a), 1);
  CHECK_EQ(q.next(b), -1);  // the loss has not been handled
  CHECK_EQ(q.next(a), 2);
}

CASE(the_last_free_thread_needs_another) {
  Queue q(4);
  PoolThread a, b;
  q.parts.queue.enter(b);
  for (std::int32_t i = 0; i < 3; ++i) q.push(WorkKind::kRequest, i);
  CHECK_EQ(q.next(a), 0);
  CHECK(!q.item.needs_thread);
  CHECK_EQ(q.next(b), 1);
  CHECK(q.item.needs_thread);
  CHECK_EQ(q.parts.queue.threads(), 2u);
  CHECK_EQ(q.next(b), 2);
  CHECK(!q.item.needs_thread);  // one is starting
}

CASE(a_caller_takes_its_completion_from_the_queue) {
  Queue q;
  struct Target final : KeepAlive {};
  for (std::uint64_t call = 1; call <= 10; ++call) {
    WorkItem item;
    item.kind = WorkKind::kCompletion;
    item.message.header.call_id = call;
    item.target = std::make_unique<Target>();
    item.peer = static_cast<std::int32_t>(call);
    q.parts.queue.push(std::move(item));
  }
  Completion completion;
  Released released;
  CHECK(q.parts.queue.take_completion(2, completion, released));
  CHECK_EQ(completion.peer, 2);
  CHECK_EQ(released.size(), 1u);
  CHECK(!q.parts.queue.take_completion(2, completion, released));
  CHECK(!q.parts.queue.take_completion(9, completion, released));  // only the first ones are searched
  std::deque<WorkItem> taken;
  q.parts.queue.take_completions({1, 9, 77}, taken);
  CHECK_EQ(taken.size(), 2u);
  q.lock.unlock();
  CHECK(q.parts.queue.remove_completion(10));
  CHECK(!q.parts.queue.remove_completion(10));
  q.lock.lock();
}

CASE(canceled_requests_move_to_the_nested_ones_in_their_order) {
  Queue q(1);
  for (std::int32_t i = 0; i < 4; ++i) {
    WorkItem item;
    item.kind = WorkKind::kRequest;
    item.peer = i;
    item.connection = 7;
    item.message.header.call_id = static_cast<std::uint64_t>(i);
    q.parts.queue.push(std::move(item));
  }
  q.parts.queue.cancel_queued(7, [](std::uint64_t call) { return call == 1 || call == 3; });
  PoolThread a, b, c, d;
  CHECK_EQ(q.next(a), 1);
  CHECK(q.item.status == CallStatus::kCanceled);
  CHECK_EQ(q.next(b), 3);
  CHECK_EQ(q.next(c), 0);
  CHECK(q.item.status == CallStatus::kPending);
  CHECK_EQ(q.next(c), 2);
}

CASE(held_requests_return_in_their_order) {
  Queue q(4);
  for (std::int32_t i = 0; i < 4; ++i) {
    WorkItem item;
    item.kind = WorkKind::kRequest;
    item.peer = i;
    item.connection = i % 2 == 0 ? 7 : 8;
    q.parts.queue.push(std::move(item));
  }
  q.parts.queue.hold(7);
  PoolThread a;
  CHECK_EQ(q.next(a), 1);
  CHECK_EQ(q.next(a), 3);
  CHECK_EQ(q.next(a), -1);
  q.parts.queue.release(7);
  CHECK_EQ(q.next(a), 0);
  CHECK_EQ(q.next(a), 2);
}

CASE(taken_elements_and_the_rest_keep_their_order) {
  std::deque<std::unique_ptr<int>> elements;
  for (int i = 0; i < 6; ++i) elements.push_back(std::make_unique<int>(i));
  int calls = 0;
  const auto taken = take_if(elements, [&](std::unique_ptr<int>& e) {
    ++calls;
    *e += 10;  // it may change the element
    return *e % 3 == 0;
  });
  CHECK_EQ(calls, 6);
  CHECK_EQ(taken.size(), 2u);
  CHECK_EQ(*taken[0], 12);
  CHECK_EQ(*taken[1], 15);
  CHECK_EQ(elements.size(), 4u);
  CHECK_EQ(*elements[0], 10);
  CHECK_EQ(*elements[3], 14);
}

}  // namespace
}  // namespace telegrad::test

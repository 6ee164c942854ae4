#include "core/work_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/take_if.h"

namespace telegrad {
namespace {

thread_local PoolThread* current = nullptr;

}  // namespace

PoolThread::~PoolThread() {
  if (current == this) current = nullptr;
}

// ---- items

std::deque<WorkItem>& WorkQueue::queue_of(const WorkItem& request) {
  if (!held_.empty()) [[unlikely]] {
    if (const auto found = held_.find(request.connection); found != held_.end()) return found->second;
  }
  return request.message.header.flags & (kNested | kLeftOut) ? nested_ : top_;
}

void WorkQueue::push(WorkItem&& item) {
  if (item.since == 0) item.since = now();
  std::deque<WorkItem>& queue = item.kind == WorkKind::kRequest ? queue_of(item) : urgent_;
  queue.push_back(std::move(item));
  if (!parts_.leader.exists()) parts_.timer.arm(now() + kHandoffDelay);
}

void WorkQueue::push_request(WorkItem&& item) {
  ++requests_;
  push(std::move(item));
}

void WorkQueue::defer(WorkItem&& item) {
  item.since = now();
  deferred_.push_back(std::move(item));
  has_deferred_.store(true, std::memory_order_relaxed);
  parts_.timer.arm(deferred_.front().since + kDeferDelay);
}

void WorkQueue::push_peer_event(WorkItem&& event) {
  if (peer_event_running_) {
    peer_events_.push_back(std::move(event));
  } else {
    peer_event_running_ = true;
    push(std::move(event));
  }
}

/// Queues the next peer event after one has been processed.
void WorkQueue::finish_peer_event() {
  peer_event_running_ = false;
  if (peer_events_.empty()) return;
  WorkItem next = std::move(peer_events_.front());
  peer_events_.pop_front();
  push_peer_event(std::move(next));
}

void WorkQueue::log(std::string text) {
  WorkItem item;
  item.kind = WorkKind::kEvent;
  item.event = EventKind::kLog;
  item.text = std::move(text);
  push(std::move(item));
}

void WorkQueue::flush_deferred() {
  if (deferred_.empty()) return;
  std::move(deferred_.begin(), deferred_.end(), std::back_inserter(urgent_));
  deferred_.clear();
  has_deferred_.store(false, std::memory_order_relaxed);
  wake_for_work();
}

bool WorkQueue::take_completion(std::uint64_t id, Completion& out, Released& released) {
  const auto end = urgent_.begin() + static_cast<std::ptrdiff_t>(std::min(urgent_.size(), kSearchDepth));
  const auto found = std::find_if(urgent_.begin(), end, [id](const WorkItem& i) {
    return i.kind == WorkKind::kCompletion && i.target && i.message.header.call_id == id;
  });
  if (found == end) return false;
  out = found->take_completion();
  released.push_back(std::move(found->target));
  if (found == urgent_.begin()) popped_at_ = completion_taken_at_ = now();  // otherwise the items before it still wait
  urgent_.erase(found);
  return true;
}

void WorkQueue::take_completions(const std::vector<std::uint64_t>& calls, std::deque<WorkItem>& out) {
  auto mine = take_if(urgent_, [&](const WorkItem& item) {
    return item.kind == WorkKind::kCompletion && item.target &&
           std::binary_search(calls.begin(), calls.end(), item.message.header.call_id);
  });
  std::ranges::move(mine, std::back_inserter(out));
}

bool WorkQueue::take_deferred(WorkItem& out) {
  if (!has_deferred_.load(std::memory_order_relaxed)) return false;
  Lock lock(parts_.mutex);
  if (deferred_.empty()) return false;
  out = std::move(deferred_.front());
  deferred_.pop_front();
  has_deferred_.store(!deferred_.empty(), std::memory_order_relaxed);
  return true;
}

bool WorkQueue::remove_completion(std::uint64_t id) {
  WorkItem item;
  Lock lock(parts_.mutex);
  for (auto* queue : {&urgent_, &deferred_}) {
    auto found = std::find_if(queue->begin(), queue->end(), [&](const WorkItem& i) {
      return i.kind == WorkKind::kCompletion && i.target && i.message.header.call_id == id;
    });
    if (found == queue->end()) continue;
    item = std::move(*found);
    queue->erase(found);
    return true;
  }
  return false;
}

// ---- canceled requests

void WorkQueue::cancel_queued(std::uint64_t connection, const std::function<bool(std::uint64_t)>& is_canceled) {
  const auto cancels = [&](WorkItem& item) {
    const FrameHeader& h = item.message.header;
    if (item.connection != connection || !is_canceled(h.call_id) || !may_leave_out(h)) return false;
    item.status = CallStatus::kCanceled;
    return true;
  };
  for (WorkItem& item : nested_) cancels(item);
  std::ranges::move(take_if(top_, cancels), std::back_inserter(nested_));
  if (const auto found = held_.find(connection); found != held_.end())
    std::ranges::move(take_if(found->second, cancels), std::back_inserter(nested_));
}

RunningRequest* WorkQueue::find_running(std::uint64_t connection, std::uint64_t call) {
  const auto found = std::ranges::find_if(
      requests_of_threads_, [&](const RunningRequest& r) { return r.call == call && r.connection == connection; });
  return found == requests_of_threads_.end() ? nullptr : &*found;
}

void WorkQueue::cancel_running(std::uint64_t connection) {
  for (RunningRequest& r : requests_of_threads_) {
    if (r.call != 0 && r.connection == connection) r.cancel();
  }
}

// ---- reply window

void WorkQueue::hold(std::uint64_t connection) {
  const auto [found, added] = held_.try_emplace(connection);
  if (!added) return;
  for (auto* queue : {&nested_, &top_}) {
    auto held = take_if(*queue, [&](const WorkItem& item) {
      return item.connection == connection && item.status == CallStatus::kPending;
    });
    std::ranges::move(held, std::back_inserter(found->second));
  }
  parts_.timer.arm(now() + kReplyWindowCheck);
}

void WorkQueue::release(std::uint64_t connection) {
  auto held = held_.extract(connection);
  if (held.empty()) return;
  for (WorkItem& item : held.mapped()) queue_of(item).push_back(std::move(item));
}

void WorkQueue::release_if(const std::function<bool(std::uint64_t)>& may_go_on) {
  if (held_.empty()) return;
  std::vector<std::uint64_t> released;
  for (const auto& [connection, requests] : held_) {
    if (may_go_on(connection)) released.push_back(connection);
  }
  for (const std::uint64_t connection : released) release(connection);
  if (!released.empty()) wake_for_work();
  if (!held_.empty()) parts_.timer.arm(now() + kReplyWindowCheck);
}

// ---- threads

void WorkQueue::enter(PoolThread& self) {
  if (!self.known) {
    self.known = true;
    self.queue = this;
    current = &self;
    self.spin = Spin(parts_.settings.spin);
    if (free_requests_.empty()) free_requests_.push_back(&requests_of_threads_.emplace_back());
    self.request = free_requests_.back();
    free_requests_.pop_back();
    ++threads_;
    thread_starting_ = false;
  }
  if (self.running) {
    self.running = false;
    self.request->call = 0;
    --running_;
    if (self.top_level) --running_top_;
    if (self.kind == WorkKind::kRequest) --running_requests_;
    if (self.kind == WorkKind::kCompletion) --running_completions_;
    if (self.runs_peer_event) finish_peer_event();
  }
}

bool WorkQueue::pop(PoolThread& self, WorkItem& out) {
  std::deque<WorkItem>* queue = has_urgent()         ? &urgent_
                                : !nested_.empty()   ? &nested_
                                : has_work()         ? &top_
                                : !deferred_.empty() ? &deferred_
                                                     : nullptr;
  if (!queue) {
    if (!urgent_.empty())
      parts_.timer.arm(completion_taken_at_ + kCompletionDelay);  // the thread that runs completions may be blocked
    return false;
  }
  popped_at_ = now();
  out = std::move(queue->front());
  queue->pop_front();
  self.running = true;
  self.top_level = queue == &top_;
  ++running_;
  if (self.top_level) ++running_top_;
  self.kind = out.kind;
  if (self.kind == WorkKind::kRequest) {
    ++running_requests_;
    const FrameHeader& h = out.message.header;
    if (popped_at_ >= out.deadline && out.status == CallStatus::kPending && may_leave_out(h))
      out.status = CallStatus::kTimedOut;
    *self.request = {.connection = out.connection,
                     .call = h.call_id,
                     .must_run = (h.flags & kMustRun) != 0,
                     .peer = out.peer,
                     .depth = h.depth,
                     .since = popped_at_};
  }
  if (self.kind == WorkKind::kCompletion) {
    ++running_completions_;
    completion_taken_at_ = popped_at_;
  }
  self.runs_peer_event =
      self.kind == WorkKind::kEvent && out.event != EventKind::kCallback && out.event != EventKind::kLog;
  out.needs_thread = running_ >= threads_ && !thread_starting_;
  if (out.needs_thread) thread_starting_ = true;
  if (has_work()) parts_.timer.arm(now() + kHandoffDelay);
  return true;
}

bool WorkQueue::sleep(Lock& lock, PoolThread& self) {
  self.parker.reset();
  idle_.push_back(&self);
  const bool stays = threads_ - running_ <= 2;  // if more threads become idle, those exit
  {
    Unlock unlocked(lock);
    const Nanos start = now();
    self.parker.wait(stays ? kNever : start + kIdleThreadTimeout);
    self.spin.slept(now() - start);
  }
  std::erase(idle_, &self);
  return self.parker.is_notified() || has_work() || parts_.stopped || threads_ - running_ <= 2;
}

void WorkQueue::spawn_failed() {
  Lock lock(parts_.mutex);
  thread_starting_ = false;
}

bool WorkQueue::suspend(PoolThread& self) {
  const bool counted = std::exchange(self.top_level, false);
  if (counted) --running_top_;
  if (counted && !top_.empty()) wake_for_work();
  return counted;
}

void WorkQueue::resume(PoolThread& self) {
  self.top_level = true;
  ++running_top_;
}

PoolThread* WorkQueue::this_thread() const { return current && current->queue == this ? current : nullptr; }

// ---- wake-ups

void WorkQueue::notify_idle_threads() {
  for (PoolThread* t : idle_) t->parker.notify();
}

void WorkQueue::on_timer(Nanos at) {
  if (!deferred_.empty()) {
    if (at - deferred_.front().since >= kDeferDelay) {
      flush_deferred();
    } else {
      parts_.timer.arm(deferred_.front().since + kDeferDelay);
    }
  }
  if (urgent_.empty() && !has_requests()) return;
  Nanos oldest = kNever;
  for (const auto* queue : {&urgent_, &nested_, &top_}) {
    if (!queue->empty()) oldest = std::min(oldest, queue->front().since);
  }
  if (at - std::max(oldest, popped_at_) >= kHandoffDelay) wake_for_work();
  if (!idle_.empty() || parts_.leader.is_parked()) {
    parts_.timer.arm(at + (has_requests() ? kHandoffDelay : kCompletionDelay));
  }
}

void WorkQueue::wake_for_work() {
  if (!has_work()) return;
  if (!idle_.empty()) {
    idle_.back()->parker.notify();
  } else if (parts_.leader.is_parked()) {
    parts_.leader.notify_parked();
  } else {
    parts_.timer.arm(now() + kHandoffDelay);
  }
}

// ---- state

WorkQueueStats WorkQueue::stats() const {
  std::size_t held = 0;
  for (const auto& [connection, requests] : held_) held += requests.size();
  return {.queued_requests = nested_.size() + top_.size() + held,
          .pool_threads = threads_,
          .running_handlers = running_,
          .running_requests = running_requests_,
          .requests = requests_};
}

}  // namespace telegrad

// Wait sets: completions go directly to the waiting thread. This saves a thread switch, and with it a handover of the
// GIL, per call.
#include <algorithm>
#include <iterator>

#include "core/engine.h"

namespace telegrad {

bool Engine::add_wait_set(WaitSet& c) {
  std::lock_guard lock(mutex_);
  std::vector<Call*> pending;
  std::vector<std::uint64_t> others, put_down;
  for (const std::uint64_t id : c.calls) {
    Call* call = calls_.find(id);
    if (!call || call->status != CallStatus::kPending) {
      others.push_back(id);
      continue;
    }
    if (!call->is_async || call->waiter || call->wait_set) return false;
    pending.push_back(call);
  }
  for (Call* call : pending) {
    call->wait_set = &c;
    c.connection = call->connection;
  }
  c.expected = pending.size();
  // Completions that are queued for the pool and have not been taken.
  const auto rest = std::stable_partition(urgent_.begin(), urgent_.end(), [&](const WorkItem& item) {
    const bool mine = item.kind == WorkKind::kCompletion && item.target &&
                      std::binary_search(c.calls.begin(), c.calls.end(), item.message.header.call_id);
    return !mine;
  });
  std::move(rest, urgent_.end(), std::back_inserter(c.completions));
  urgent_.erase(rest, urgent_.end());
  for (const WorkItem& item : c.completions) put_down.push_back(item.message.header.call_id);
  std::sort(put_down.begin(), put_down.end());
  std::set_difference(others.begin(), others.end(), put_down.begin(), put_down.end(),
                      std::back_inserter(c.taken_elsewhere));
  wait_sets_.push_back(&c);
  return true;
}

WaitEnd Engine::wait(WaitSet& c, const std::function<bool()>& interrupted, std::deque<WorkItem>& out) {
  const auto done = [&c] { return !c.completions.empty() || c.expected == 0 || c.notified; };
  const WaitEnd end = wait_for(For::kCompletions, c.waiter, done, kNever, interrupted, c.connection);
  std::lock_guard lock(mutex_);
  std::move(c.completions.begin(), c.completions.end(), std::back_inserter(out));
  c.completions.clear();
  c.notified = false;
  c.exhausted = c.expected == 0;
  return end;
}

void Engine::notify_wait_sets() {
  std::lock_guard lock(mutex_);
  if (wait_sets_.empty()) return;
  for (WaitSet* c : wait_sets_) {
    c->notified = true;
    c->waiter.parker.notify();
  }
  interrupt_poll();  // one of them may be the leader
}

void Engine::remove_wait_set(WaitSet& c, std::deque<WorkItem>& left) {
  std::lock_guard lock(mutex_);
  std::erase(wait_sets_, &c);
  if (c.expected > 0) {
    for (const std::uint64_t id : c.calls) {
      if (Call* call = calls_.find(id); call && call->wait_set == &c) call->wait_set = nullptr;
    }
  }
  std::move(c.completions.begin(), c.completions.end(), std::back_inserter(left));
  c.completions.clear();
  if (stopped_ && threads_ == 0) return;
  for (WorkItem& item : left) push(std::move(item));
  left.clear();
  wake_for_work();
  if (!has_leader_ && (calls_.waiting_async() > 0 || !sleeping_callers_.empty())) watch_links();
}

}  // namespace telegrad

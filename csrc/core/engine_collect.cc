// Wait sets: completions go directly to the waiting thread. This saves a thread switch, and with it a handover of the
// GIL, per call.
#include <algorithm>
#include <iterator>

#include "core/engine.h"

namespace telegrad {

bool Engine::collect(Collector& c) {
  std::lock_guard lock(mutex_);
  std::vector<Call*> pending;
  std::vector<std::uint64_t> others, put_down;
  for (const std::uint64_t id : c.calls) {
    Call* call = calls_.find(id);
    if (!call || call->status != CallStatus::kPending) {
      others.push_back(id);
      continue;
    }
    if (!call->collected || call->waiter || call->collector) return false;
    pending.push_back(call);
  }
  for (Call* call : pending) {
    call->collector = &c;
    c.connection = call->connection;
  }
  c.expected = pending.size();
  // Completions that are queued for the pool and have not been taken.
  const auto rest = std::stable_partition(urgent_.begin(), urgent_.end(), [&](const Item& item) {
    const bool mine = item.kind == ItemKind::kOutcome && item.cookie &&
                      std::binary_search(c.calls.begin(), c.calls.end(), item.message.header.call_id);
    return !mine;
  });
  std::move(rest, urgent_.end(), std::back_inserter(c.outcomes));
  urgent_.erase(rest, urgent_.end());
  for (const Item& item : c.outcomes) put_down.push_back(item.message.header.call_id);
  std::sort(put_down.begin(), put_down.end());
  std::set_difference(others.begin(), others.end(), put_down.begin(), put_down.end(), std::back_inserter(c.elsewhere));
  collectors_.push_back(&c);
  return true;
}

WaitEnd Engine::wait(Collector& c, const std::function<bool()>& interrupted, std::deque<Item>& out) {
  const auto done = [&c] { return !c.outcomes.empty() || c.expected == 0 || c.told; };
  const WaitEnd end = wait_for(For::kOutcomes, c.waiter, done, kNever, interrupted, c.connection);
  std::lock_guard lock(mutex_);
  std::move(c.outcomes.begin(), c.outcomes.end(), std::back_inserter(out));
  c.outcomes.clear();
  c.told = false;
  c.over = c.expected == 0;
  return end;
}

void Engine::tell_collectors() {
  std::lock_guard lock(mutex_);
  if (collectors_.empty()) return;
  for (Collector* c : collectors_) {
    c->told = true;
    c->waiter.bell.ring();
  }
  kick();  // one of them may be the leader
}

void Engine::stop_collecting(Collector& c, std::deque<Item>& left) {
  std::lock_guard lock(mutex_);
  std::erase(collectors_, &c);
  if (c.expected > 0) {
    for (const std::uint64_t id : c.calls) {
      if (Call* call = calls_.find(id); call && call->collector == &c) call->collector = nullptr;
    }
  }
  std::move(c.outcomes.begin(), c.outcomes.end(), std::back_inserter(left));
  c.outcomes.clear();
  if (stopped_ && threads_ == 0) return;
  for (Item& item : left) push(std::move(item));
  left.clear();
  wake_for_work();
  if (!role_held_ && (calls_.waiting_async() > 0 || !sleepers_.empty())) watch();
}

}  // namespace telegrad

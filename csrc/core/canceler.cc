#include "core/canceler.h"

#include <utility>
#include <vector>

#include "core/engine_parts.h"

namespace telegrad {

std::unique_ptr<Outgoing> cancel_frame(FrameType type, std::uint64_t call, std::uint8_t tag) {
  auto m = std::make_unique<Outgoing>();
  m->header.type = type;
  m->header.call_id = call;
  m->header.tag = tag;
  return m;
}

void Canceler::cancel_requests(const ConnectionPtr& c) {
  const auto reasons = std::exchange(reasons_, {});
  std::unordered_map<std::uint64_t, CallState> states;
  // The states are sent before the replies of the canceled requests: a call ends with whichever arrives first, and a
  // reply does not say how far the request had come.
  MutexLock sending(c->send_mutex);
  {
    Lock lock(parts_.mutex);
    parts_.queue.cancel_queued(c->id, [&](std::uint64_t call) {
      return reasons.contains(call) && states.emplace(call, CallState::kQueued).second;
    });
    for (const auto& [call, reason] : reasons) {
      if (!states.contains(call)) states[call] = cancel_started({c->id, call});
    }
  }
  for (const auto& [call, state] : states) {
    if (reasons.at(call) != CancelReason::kExpired) continue;
    auto m = cancel_frame(FrameType::kCallState, call, static_cast<std::uint8_t>(state));
    Transmission p;
    parts_.sender.transmit_locked(c, m, p);
  }
}

/// Cancels a request that is not queued and returns how far it has come.
CallState Canceler::cancel_started(const Key& key) {
  if (RunningRequest* running = parts_.queue.find_running(key.first, key.second)) {
    running->cancel();
    return CallState::kRunning;
  }
  const auto found = detached_.find(key);
  if (found == detached_.end()) return CallState::kReplied;
  cancel_detached(key, found->second);
  return found->second.deferred ? CallState::kRunning : CallState::kQueued;
}

void Canceler::cancel_detached(const Key& key, Detached& request) {
  if (request.must_run || std::exchange(request.canceled, true) || !request.deferred) return;
  WorkItem item;
  item.kind = WorkKind::kCancel;
  item.connection = key.first;
  item.message.header.call_id = key.second;
  parts_.queue.push(std::move(item));
}

void Canceler::cancel_requests_of(std::uint64_t connection) {
  parts_.queue.cancel_queued(connection, [](std::uint64_t) { return true; });
  parts_.queue.cancel_running(connection);
  for (auto it = detached_.lower_bound({connection, 0}); it != detached_.end() && it->first.first == connection; ++it)
    cancel_detached(it->first, it->second);
  parts_.queue.wake_for_work();
}

bool Canceler::detach(std::uint64_t connection, std::uint64_t call, bool deferred) {
  Lock lock(parts_.mutex);
  return detach({connection, call}, deferred).canceled;
}

void Canceler::park(const WorkItem& request) {
  Lock lock(parts_.mutex);
  detach({request.connection, request.message.header.call_id}, false).name = request.name;
}

Canceler::Detached& Canceler::detach(const Key& key, bool deferred) {
  const auto [found, added] = detached_.try_emplace(key);
  Detached& request = found->second;
  if (!added && !request.deferred) --parked_;
  if (!deferred) ++parked_;
  request.deferred = deferred;
  if (RunningRequest* running = parts_.queue.find_running(key.first, key.second)) {
    request.canceled = running->canceled;
    request.must_run = running->must_run;
    request.late = running->late;
    request.peer = running->peer;
    request.since = running->since;
    *running = {};
  }
  return request;
}

bool Canceler::is_canceled(std::uint64_t connection, std::uint64_t call) const {
  Lock lock(parts_.mutex);
  if (const RunningRequest* running = parts_.queue.find_running(connection, call)) return running->canceled;
  const auto found = detached_.find({connection, call});
  return found != detached_.end() && found->second.canceled;
}

void Canceler::mark_late(std::uint64_t connection, std::uint64_t call) {
  Lock lock(parts_.mutex);
  if (RunningRequest* running = parts_.queue.find_running(connection, call)) {
    running->late = true;
  } else if (const auto found = detached_.find({connection, call}); found != detached_.end()) {
    found->second.late = true;
  }
}

bool Canceler::on_reply(std::uint64_t connection, std::uint64_t call) {
  bool late = false;
  if (!detached_.empty()) [[unlikely]] {
    const auto found = detached_.find({connection, call});
    if (found != detached_.end()) {
      late = found->second.late;
      if (!found->second.deferred) --parked_;
      detached_.erase(found);
    }
  }
  return parts_.queue.end_request(connection, call) || late;
}

}  // namespace telegrad

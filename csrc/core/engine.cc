// Construction, timer, stop, fork and statistics of the engine.
#include "core/engine.h"

#include <algorithm>
#include <utility>

#include "core/tuning.h"

namespace telegrad {

Engine::Engine(Settings settings) : parts_(std::move(settings)) {
  parts_.timer.start(parts_.mutex, [this](Lock& lock) { on_timer(lock); });
  register_fork_handler(this, ForkLevel::kEngine);
}

Engine::~Engine() {
  unregister_fork_handler(this, ForkLevel::kEngine);
  stop(0);
  parts_.timer.stop(parts_.mutex);
  parts_.buffers->disable_cache();  // holders of received memory must not keep the cache alive
}

bool Engine::try_next(PoolThread& self, WorkItem& out) {
  Lock lock(parts_.mutex);
  if (!self.known) return false;
  parts_.queue.enter(self);
  if (!parts_.queue.pop(self, out)) return false;
  parts_.sender.begin_item(lock, out);
  return true;
}

void Engine::stop(Nanos timeout) {
  const Nanos deadline = now() + timeout;
  std::vector<ConnectionPtr> open;
  {
    Lock lock(parts_.mutex);
    if (std::exchange(stop_begun_, true)) return;
  }
  Waiter w;
  const auto nothing_waits = [&]() REQUIRES(engine_mutex) { return !parts_.peers.has_pending(); };
  // Messages already accepted must get a connection.
  parts_.leader.wait_for_progress(w, nothing_waits, deadline, {});
  {
    Lock lock(parts_.mutex);
    parts_.stopping = true;
    for (const auto& [token, c] : parts_.peers.connections()) open.push_back(c);
  }
  for (auto& c : open) {
    if (c->state != Connection::State::kOpen || parts_.peers.is_suspended(*c)) continue;
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kGoodbye;
    Transmission p{.connection = c};
    if (parts_.sender.transmit(c, m, p) == SendResult::kQueued) parts_.sender.wait_until_sent(c->peer, p, deadline, {});
  }
  for (auto& c : open) parts_.peers.close_connection(c, kShutDown);
  Released released;
  Lock lock(parts_.mutex);
  parts_.stopped = true;
  parts_.calls.stop_all(released);
  parts_.peers.stop(kShutDown, released);
  parts_.calls.release_keep_alives(released);
  parts_.peers.stop_listening();
  parts_.queue.flush_deferred();
  parts_.queue.notify_idle_threads();
  parts_.leader.notify_sleeping_callers();
  parts_.leader.notify_parked();
  parts_.leader.interrupt_poll();
  lock.unlock();
  released.clear();
}

EngineStats Engine::stats() const {
  Lock lock(parts_.mutex);
  EngineStats s;
  const WorkQueueStats queue = parts_.queue.stats();
  s.pending_calls = parts_.calls.size();
  s.queued_requests = queue.queued_requests;
  s.pool_threads = queue.pool_threads;
  s.running_handlers = queue.running_handlers;
  s.running_requests = queue.running_requests;
  s.detached_requests = parts_.canceler.detached();
  s.connections = parts_.peers.connections().size();
  for (const auto& [token, c] : parts_.peers.connections()) s.lanes += c->link->lanes();
  s.requests = queue.requests;
  s.replies = parts_.calls.replies();
  s.sent_messages = parts_.sender.sent_messages();
  s.received_messages = parts_.leader.received_messages();
  s.memory = parts_.buffers->stats();
  s.multicast_buffers = parts_.multicast_arena->stats().buffers;
  return s;
}

// ---- timer

void Engine::on_timer(Lock& lock) {
  Released released;
  std::vector<SentCall> expired;
  std::vector<ConnectionPtr> lenders;
  const Nanos at = now();
  parts_.timer.clear();
  const Detector::Findings findings = parts_.detector.on_timer(at);
  parts_.calls.expire(at, released, expired);
  parts_.peers.on_timer(lock, at);
  parts_.leader.on_timer(at);
  parts_.sender.release_held();
  parts_.queue.on_timer(at);
  const auto overfull = parts_.overload.take_overfull();
  const bool trims = trim_is_due(at);
  const Nanos trim_age = trims && parts_.budget->take_short() ? kShortTrimAge : kTrimInterval;
  if (trims) {
    parts_.buffers->trim(at - trim_age);
    for (const auto& [token, c] : parts_.peers.connections()) lenders.push_back(c);
  }
  parts_.timer.arm(parts_.calls.next_deadline());
  const Nanos since = parts_.sender.coalescing_since();
  const bool flushes = at >= since && at - since >= kHandoffDelay;
  if (since != kNever && !flushes) parts_.timer.arm(since + kHandoffDelay);
  lock.unlock();
  parts_.leader.read_for_timer();
  parts_.detector.act(findings);
  for (const auto& [c, why] : overfull) parts_.peers.close_connection(c, why);
  for (const SentCall& call : expired) parts_.calls.send_cancel(call, CancelReason::kExpired, {});
  if (flushes) parts_.sender.flush_coalesced();
  if (trims) parts_.multicast_arena->trim(at - trim_age);
  for (const auto& c : lenders) c->link->trim(at - trim_age);
  released.clear();
}

/// Returns whether to release cached memory now. Arms the timer while there may be any.
bool Engine::trim_is_due(Nanos at) {
  const auto& connections = parts_.peers.connections();
  const bool leases = std::any_of(connections.begin(), connections.end(),
                                  [](const auto& c) { return c.second->link->lease_capacity() > 0; });
  if (!leases && parts_.multicast_arena->size() == 0 && parts_.buffers->stats().cached_blocks == 0) return false;
  const bool due = at >= trim_at_;
  if (due) trim_at_ = at + kTrimInterval;
  parts_.timer.arm(trim_at_);
  return due;
}

// ---- forks

void Engine::before_fork() {
  parts_.mutex.lock();
  parts_.buffers->before_fork();
}

void Engine::after_fork_in_parent() {
  parts_.buffers->after_fork();
  parts_.mutex.unlock();
}

/// Leaves the child with a stopped engine: it has no threads, and its links belong to the parent. Objects that other
/// threads of the parent were using may be in an inconsistent state and are never destroyed: links and their locks,
/// threads and their stacks.
void Engine::after_fork_in_child() {
  parts_.forked = stop_begun_ = parts_.stopped = true;
  parts_.stopping = true;
  parts_.peers.abandon_in_child();
  parts_.sender.abandon_in_child();
  parts_.leader.abandon_in_child();
  parts_.timer.abandon_in_child();
  parts_.queue.abandon_in_child();
  parts_.calls.abandon_in_child();
  parts_.buffers->after_fork();
  MemoryUse::after_fork();
  parts_.mutex.unlock();
}

}  // namespace telegrad

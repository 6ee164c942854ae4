#include "core/call_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/call_options.h"
#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/tuning.h"

namespace telegrad {

// ---- calls

std::uint64_t CallTable::open(std::int32_t peer, const FrameHeader& request, Nanos at, CallOptions& options) {
  const std::uint64_t id = slab_.open(peer);
  Call& call = *slab_.find(id);
  call.is_async = options.target != nullptr;
  call.name_id = request.name_id;
  call.since = at;
  call.must_send = request.flags & kMustDeliver;
  call.wait_for_connection = options.background && call.must_send;
  call.background = options.background;
  call.deferrable = options.deferrable;
  call.target = std::move(options.target);
  call.keep_alive = std::move(options.keep_alive);
  if (call.is_async) {
    if (!options.background && !options.polled) slab_.count_async(call);
  }
  return id;
}

void CallTable::set_deadline(std::uint64_t id, Nanos deadline) {
  const Call* call = slab_.find(id);
  if (!call || call->status != CallStatus::kPending) return;
  slab_.set_deadline(id, deadline);
  parts_.timer.arm(slab_.next_deadline());
}

void CallTable::set_connection(std::uint64_t id, std::uint64_t connection) {
  if (Call* call = slab_.find(id)) call->connection = connection;
  if (auto kept = keep_alives_.find(id); kept != keep_alives_.end()) kept->second.connection = connection;
}

void CallTable::complete(std::uint64_t id, Completion&& completion, Released& released) {
  Call* call = slab_.find(id);
  if (!call || call->status != CallStatus::kPending) return;
  if (call->expired && completion.status != CallStatus::kTimedOut) [[unlikely]]
    completion = Completion::timed_out(CallState::kUnknown);  // its deadline came first
  const bool replied = completion.status == CallStatus::kReplied;
  completion.peer = call->peer;
  call->status = completion.status;
  slab_.clear_deadline(*call);
  if (call->is_async && !call->waiter) {
    const bool may_defer = call->deferrable && replied;
    WaitSet* const wait_set = call->wait_set;
    WorkItem item = end_async(id, std::move(completion), released);
    if (wait_set) {
      --wait_set->expected;
      wait_set->completions.push_back(std::move(item));
      wait_set->waiter.parker.notify();
      if (!replied) parts_.leader.interrupt_poll();  // the waiter may be the leader
      return;
    }
    if (may_defer) return parts_.queue.defer(std::move(item));
    parts_.queue.push(std::move(item));
    if (!replied)
      parts_.queue.wake_for_work();  // the reader of a reply does this itself; for the rest, this may be any thread
    return;
  }
  call->completion = std::move(completion);
  if (!call->waiter) return;
  call->waiter->parker.notify();
  if (!replied) parts_.leader.interrupt_poll();  // the waiter may be the leader
}

/// Closes an asynchronous call; returns its completion for the pool, or for the thread that takes it.
WorkItem CallTable::end_async(std::uint64_t id, Completion&& completion, Released& released) {
  Call* call = slab_.find(id);
  WorkItem item;
  item.kind = WorkKind::kCompletion;
  item.status = call->status = completion.status;
  item.loss = completion.loss;
  item.peer = call->peer;
  item.connection = completion.connection;
  item.message = std::move(completion.reply);
  item.message.header.call_id = id;
  item.target = std::move(call->target);
  item.text = std::move(completion.why);
  close_call(id, completion.status == CallStatus::kReplied, released);
  return item;
}

/// Closes a call. Its `keep_alive` is kept if no reply has arrived.
void CallTable::close_call(std::uint64_t id, bool replied, Released& released) {
  Call* call = slab_.find(id);
  if (call->target) released.push_back(std::move(call->target));
  if (!replied && !call->is_async) {
    const ConnectionPtr c = parts_.peers.find_connection(call->connection);
    if (c && c->resumes) c->link->resumable()->release(id, released);
  }
  if (call->keep_alive) {
    const bool ended = call->status != CallStatus::kPending && call->status != CallStatus::kTimedOut &&
                       call->status != CallStatus::kCanceled;
    const bool unsent = call->connection == 0 && call->must_send && !ended;
    if (replied || (!unsent && !parts_.peers.has_connection(call->connection))) {  // no late reply can arrive
      released.push_back(std::move(call->keep_alive));
    } else {
      keep_alives_.emplace(id, KeptAlive{call->connection, std::move(call->keep_alive)});
    }
  }
  slab_.close(id);
}

void CallTable::release_keep_alive(std::uint64_t id, Released& released) {
  auto found = keep_alives_.find(id);
  if (found == keep_alives_.end()) return;
  released.push_back(std::move(found->second.owner));
  keep_alives_.erase(found);
}

/// Queues a reply that no thread waits for, because it carries references that must be released.
void CallTable::orphan(std::int32_t peer, std::uint64_t connection, Incoming&& m) {
  WorkItem item;
  item.kind = WorkKind::kCompletion;
  item.status = CallStatus::kReplied;
  item.peer = peer;
  item.connection = connection;
  item.message = std::move(m);
  parts_.queue.push(std::move(item));
}

void CallTable::fail_calls_of(std::uint64_t connection, CallStatus status, const LinkError& why, Released& released) {
  slab_.for_each([&](std::uint64_t id, Call& call) REQUIRES(engine_mutex) {
    if (call.connection == connection) complete(id, Completion::lost(status, why), released);
  });
  for (auto it = keep_alives_.begin(); it != keep_alives_.end();) {
    if (it->second.connection == connection) {
      released.push_back(std::move(it->second.owner));
      it = keep_alives_.erase(it);
    } else {
      ++it;
    }
  }
}

void CallTable::stop_all(Released& released) {
  slab_.for_each([&](std::uint64_t id, Call&) REQUIRES(engine_mutex) {
    complete(id, Completion{.status = CallStatus::kStopped, .why = kShutDown}, released);
  });
}

void CallTable::release_keep_alives(Released& released) {
  for (auto& [id, kept] : keep_alives_) released.push_back(std::move(kept.owner));
  keep_alives_.clear();
}

void CallTable::abandon_in_child() {
  slab_.for_each([](std::uint64_t, Call& call) {
    call.waiter = nullptr;
    if (call.status != CallStatus::kPending) return;
    call.status = CallStatus::kStopped;
    call.completion = {.status = CallStatus::kStopped, .peer = call.peer, .why = kForked};
  });
}

// ---- replies

void CallTable::complete_replies(const ConnectionPtr& c) {
  Released released;
  {
    Lock lock(parts_.mutex);
    for (Incoming& m : unprocessed_replies_) on_reply(c, std::move(m), released);
    if (std::exchange(frees_request_, false)) [[unlikely]]
      parts_.leader.notify_progress();
  }
  unprocessed_replies_.clear();
}

void CallTable::on_reply(const ConnectionPtr& c, Incoming&& m, Released& released) {
  ++replies_;
  const std::uint64_t id = m.header.call_id;
  if (!c->in_flight_bytes.empty()) [[unlikely]]
    frees_request_ = c->in_flight_bytes.remove(id) || frees_request_;
  if (Call* call = slab_.find(id)) {
    if (call->connection != c->id) return;  // only the peer that got the request may answer it
    if (call->status == CallStatus::kPending) {
      // The callee may notice first that the deadline has passed.
      if (call->expired || m.header.flags & kLate || has_expired(m)) [[unlikely]]
        return complete_late(id, std::move(m), released);
      return complete(id, Completion{.status = CallStatus::kReplied, .reply = std::move(m), .connection = c->id},
                      released);
    }
    if (call->keep_alive) released.push_back(std::move(call->keep_alive));
  }
  if (auto kept = keep_alives_.find(id); kept != keep_alives_.end()) {
    if (kept->second.connection != c->id) return;
    released.push_back(std::move(kept->second.owner));
    keep_alives_.erase(kept);
  }
  if (m.header.flags & kMustDeliver) orphan(c->peer, c->id, std::move(m));
}

// ---- waiting

WaitEnd CallTable::wait(std::uint64_t id, Nanos deadline, const std::function<bool()>& interrupted, Completion& out) {
  Waiter w;
  Released released;
  Lock lock(parts_.mutex);
  Call* const call = slab_.find(id);
  if (!call && parts_.forked) {  // its completion went to the pool of the parent
    out = {.status = CallStatus::kStopped, .why = kForked};
    return WaitEnd::kDone;
  }
  if (!call && parts_.queue.take_completion(id, out, released)) return WaitEnd::kDone;
  if (!call) parts_.queue.flush_deferred();  // its completion may be deferred
  if (!call || call->waiter || call->wait_set) return WaitEnd::kStopped;
  call->waiter = &w;  // until this is reset, no other thread closes the call
  const auto done = [call] { return call->status != CallStatus::kPending; };
  const WaitEnd end = parts_.leader.wait_for(lock, WaitFor::kReply, w, done, deadline, interrupted, call->connection);
  call->waiter = nullptr;
  if (call->status == CallStatus::kPending) return end;
  if (end == WaitEnd::kInterrupted) {
    if (call->is_async) {  // its future may have callbacks
      parts_.queue.push(end_async(id, std::move(call->completion), released));
      parts_.queue.wake_for_work();
    }
    return end;
  }
  out = std::move(call->completion);
  close_call(id, out.status == CallStatus::kReplied, released);
  return WaitEnd::kDone;
}

// ---- wait sets

bool CallTable::add_wait_set(WaitSet& set) {
  Lock lock(parts_.mutex);
  std::vector<Call*> pending;
  std::vector<std::uint64_t> others, put_down;
  for (const std::uint64_t id : set.calls) {
    Call* call = slab_.find(id);
    if (!call || call->status != CallStatus::kPending) {
      others.push_back(id);
      continue;
    }
    if (!call->is_async || call->waiter || call->wait_set) return false;
    pending.push_back(call);
  }
  for (Call* call : pending) {
    call->wait_set = &set;
    set.connection = call->connection;
  }
  set.expected = pending.size();
  // Completions that are queued for the pool and have not been taken.
  parts_.queue.take_completions(set.calls, set.completions);
  for (const WorkItem& item : set.completions) put_down.push_back(item.message.header.call_id);
  std::sort(put_down.begin(), put_down.end());
  std::set_difference(others.begin(), others.end(), put_down.begin(), put_down.end(),
                      std::back_inserter(set.taken_elsewhere));
  wait_sets_.push_back(&set);
  return true;
}

WaitEnd CallTable::wait(WaitSet& set, const std::function<bool()>& interrupted, std::deque<WorkItem>& out) {
  const auto done = [&set] { return !set.completions.empty() || set.expected == 0 || set.notified; };
  Lock lock(parts_.mutex);
  const WaitEnd end =
      parts_.leader.wait_for(lock, WaitFor::kCompletions, set.waiter, done, kNever, interrupted, set.connection);
  std::move(set.completions.begin(), set.completions.end(), std::back_inserter(out));
  set.completions.clear();
  set.notified = false;
  set.exhausted = set.expected == 0;
  return end;
}

void CallTable::notify_wait_sets() {
  Lock lock(parts_.mutex);
  if (wait_sets_.empty()) return;
  for (WaitSet* set : wait_sets_) {
    set->notified = true;
    set->waiter.parker.notify();
  }
  parts_.leader.interrupt_poll();  // one of them may be the leader
}

void CallTable::remove_wait_set(WaitSet& set, std::deque<WorkItem>& left) {
  Lock lock(parts_.mutex);
  std::erase(wait_sets_, &set);
  if (set.expected > 0) {
    for (const std::uint64_t id : set.calls) {
      if (Call* call = slab_.find(id); call && call->wait_set == &set) call->wait_set = nullptr;
    }
  }
  std::move(set.completions.begin(), set.completions.end(), std::back_inserter(left));
  set.completions.clear();
  if (parts_.stopped && parts_.queue.threads() == 0) return;
  for (WorkItem& item : left) parts_.queue.push(std::move(item));
  left.clear();
  parts_.queue.wake_for_work();
  if (!parts_.leader.exists() && (slab_.waiting_async() > 0 || parts_.leader.has_sleeping_callers()))
    parts_.leader.watch_links();
}

}  // namespace telegrad

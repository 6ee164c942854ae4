// Ends of calls that the caller decides: cancellation, and deadlines.
//
// The callee is notified of either (kCancel), so that it drops the request or stops its handler. At a deadline the
// caller also asks how far the request has come, for the text of the error. It waits for the answer for kStateGrace;
// meanwhile the call is pending and `expired`, and only times out.
#include <utility>

#include "core/call_table.h"
#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/tuning.h"

namespace telegrad {

bool CallTable::cancel(std::uint64_t id, WorkItem& taken, const std::function<void()>& before_blocking) {
  Released released;
  ConnectionPtr c;
  {
    Lock lock(parts_.mutex);
    Call* call = slab_.find(id);
    if (!call || call->status != CallStatus::kPending || call->expired || call->background) return false;
    c = parts_.peers.find_connection(call->connection);
    Completion canceled{.status = CallStatus::kCanceled};
    if (call->is_async && !call->waiter && !call->wait_set) {
      taken = end_async(id, std::move(canceled), released);
    } else {
      complete(id, std::move(canceled), released);
    }
  }
  if (c) send_cancel({c, id}, CancelReason::kCanceled, before_blocking);
  return true;
}

void CallTable::give_up(std::uint64_t id) {
  Released released;
  ConnectionPtr c;
  {
    Lock lock(parts_.mutex);
    Call* call = slab_.find(id);
    if (!call) return;
    const bool replied = call->status == CallStatus::kReplied;  // completed after the last `wait`
    if (replied && call->completion.reply.header.flags & kMustDeliver) {
      orphan(call->peer, call->completion.connection, std::move(call->completion.reply));
      parts_.queue.wake_for_work();
    }
    if (call->status == CallStatus::kPending && !call->expired) c = parts_.peers.find_connection(call->connection);
    close_call(id, replied, released);
  }
  if (c) send_cancel({c, id}, CancelReason::kCanceled, {});
}

void CallTable::expire(Nanos at, Released& released, std::vector<SentCall>& expired) {
  bool any = false;
  while (const std::uint64_t id = slab_.pop_expired(at)) {
    if (slab_.find(id)->expired) {
      complete(id, Completion::timed_out(CallState::kUnknown), released);
    } else if (ConnectionPtr c = begin_grace(id, released)) {
      slab_.set_deadline(id, at + kStateGrace);
      expired.push_back({std::move(c), id});
      continue;
    }
    any = true;
  }
  if (any) parts_.leader.interrupt_poll();  // the leader may wait for one of them
}

WaitEnd CallTable::expire(std::uint64_t id, const std::function<bool()>& interrupted, Completion& out) {
  ConnectionPtr c;
  {
    Released released;
    Lock lock(parts_.mutex);
    Call* call = slab_.find(id);
    if (call && call->status == CallStatus::kPending) c = begin_grace(id, released);
  }
  if (c) send_cancel({c, id}, CancelReason::kExpired, {});
  const WaitEnd end = wait(id, now() + kStateGrace, interrupted, out);
  if (end != WaitEnd::kDeadline) return end;
  give_up(id);
  out = Completion::timed_out(CallState::kUnknown);
  return WaitEnd::kDone;
}

void CallTable::expire_soon(std::uint64_t id) {
  Lock lock(parts_.mutex);
  Call* call = slab_.find(id);
  if (!call || call->status != CallStatus::kPending || call->expired) return;
  slab_.clear_deadline(*call);
  set_deadline(id, now());
}

/// Marks a call as expired. Returns the connection on which to ask for its state. Returns null if that cannot be asked;
/// then the call has been completed.
ConnectionPtr CallTable::begin_grace(std::uint64_t id, Released& released) {
  Call* call = slab_.find(id);
  call->expired = true;
  ConnectionPtr c = call->background ? nullptr : parts_.peers.find_connection(call->connection);
  if (!c) {
    Completion ended = Completion::timed_out(call->connection == 0 ? CallState::kWaiting : CallState::kUnknown);
    if (call->background && call->connection != 0) ended.why.clear();  // not asked
    complete(id, std::move(ended), released);
  }
  return c;
}

void CallTable::on_state(const Connection& c, std::uint64_t id, CallState state) {
  Released released;
  Lock lock(parts_.mutex);
  Call* call = slab_.find(id);
  if (call && call->connection == c.id && call->expired) complete(id, Completion::timed_out(state), released);
}

/// Completes an expired call when its reply has arrived. The reply to a request that never ran says so, and the reply
/// of a handler that still ran at the deadline.
void CallTable::complete_late(std::uint64_t id, Incoming&& reply, Released& released) {
  Call* call = slab_.find(id);
  if (call->keep_alive) released.push_back(std::move(call->keep_alive));
  const CallState state = has_expired(reply)           ? CallState::kQueued
                          : reply.header.flags & kLate ? CallState::kRunning
                                                       : CallState::kReplied;
  if (reply.header.flags & kMustDeliver) orphan(call->peer, call->connection, std::move(reply));
  complete(id, Completion::timed_out(state), released);
}

void CallTable::send_cancel(const SentCall& call, CancelReason reason, const std::function<void()>& before_blocking) {
  auto m = cancel_frame(FrameType::kCancel, call.id, static_cast<std::uint8_t>(reason));
  Transmission p{.before_blocking = &before_blocking};
  parts_.sender.transmit(call.connection, m, p);
}

}  // namespace telegrad

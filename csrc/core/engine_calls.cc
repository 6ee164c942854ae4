// Calls: start, wait, matching of replies, and processing of received messages.
#include <algorithm>
#include <cstring>

#include "core/engine.h"
#include "core/left_out.h"

namespace telegrad {
namespace {

constexpr std::size_t kSearchDepth = 4;
constexpr std::int64_t kLarge = 64 << 10;  // larger payloads are not copied under a lock

/// Returns the error text for a message for which this worker had no memory.
void explain(Incoming& m, const std::string& me, BufferPool& pool) {
  const std::string text = static_cast<char>(LeftOut::kNoMemory) +
                           ("worker " + me + " has no memory for a message of ") + std::to_string(m.discarded) +
                           " bytes.";
  m.header.flags |= kLeftOut;
  m.body = pool.allocate(text.size());
  std::memcpy(m.body->data(), text.data(), text.size());
}

}  // namespace

// ---- completions

/// Requires mutex_. Closes a call. Its `keep_alive` is kept if no reply has arrived.
void Engine::close_call(std::uint64_t id, bool replied, Released& released) {
  Call* call = calls_.find(id);
  if (call->target) released.push_back(std::move(call->target));
  if (call->keep_alive) {
    const bool ended = call->status != CallStatus::kPending && call->status != CallStatus::kTimedOut;
    const bool unsent = call->connection == 0 && call->must_send && !ended;
    if (replied || (!unsent && !connections_.contains(call->connection))) {  // no late reply can arrive
      released.push_back(std::move(call->keep_alive));
    } else {
      keep_alives_.emplace(id, KeptAlive{call->connection, std::move(call->keep_alive)});
    }
  }
  calls_.close(id);
}

/// Requires mutex_. Releases the `keep_alive` of a call, because no late reply can arrive.
void Engine::release_keep_alive(std::uint64_t id, Released& released) {
  auto found = keep_alives_.find(id);
  if (found == keep_alives_.end()) return;
  released.push_back(std::move(found->second.owner));
  keep_alives_.erase(found);
}

/// Requires mutex_. Passes a completion to the waiting thread, to a wait set, or to the pool.
void Engine::complete(std::uint64_t id, Completion&& completion, Released& released) {
  Call* call = calls_.find(id);
  if (!call || call->status != CallStatus::kPending) return;
  const bool replied = completion.status == CallStatus::kReplied;
  completion.peer = call->peer;
  call->status = completion.status;
  calls_.clear_deadline(*call);
  if (call->is_async && !call->waiter) {
    WorkItem item;
    item.kind = WorkKind::kCompletion;
    item.peer = call->peer;
    item.message.header.call_id = id;  // for `remove_completion`
    item.target = std::move(call->target);
    item.completion = std::move(completion);
    const bool background = call->deferrable && replied;
    WaitSet* const wait_set = call->wait_set;
    close_call(id, replied, released);
    if (wait_set) {
      --wait_set->expected;
      wait_set->completions.push_back(std::move(item));
      wait_set->waiter.parker.notify();
      if (!replied) interrupt_poll();  // the waiter may be the leader
      return;
    }
    if (background) {
      item.since = now();
      deferred_.push_back(std::move(item));
      has_deferred_.store(true, std::memory_order_relaxed);
      return arm_timer(deferred_.front().since + kDeferDelay);
    }
    push(std::move(item));
    if (!replied) wake_for_work();  // the reader of a reply does this itself; for the rest, this may be any thread
    return;
  }
  call->completion = std::move(completion);
  if (!call->waiter) return;
  call->waiter->parker.notify();
  if (!replied) interrupt_poll();  // the waiter may be the leader
}

/// Requires mutex_. Queues a reply that no thread waits for, because it carries references that must be released.
void Engine::orphan(std::int32_t peer, Incoming&& m) {
  WorkItem item;
  item.kind = WorkKind::kCompletion;
  item.peer = peer;
  item.completion = Completion{.status = CallStatus::kReplied, .reply = std::move(m), .peer = peer};
  push(std::move(item));
}

/// Processes the replies of one read under one lock.
void Engine::process_replies(const ConnectionPtr& c) {
  if (unprocessed_replies_.empty()) return;
  Released released;
  {
    std::lock_guard lock(mutex_);
    for (Incoming& m : unprocessed_replies_) on_reply(c, std::move(m), released);
  }
  unprocessed_replies_.clear();
}

/// Requires mutex_.
void Engine::on_reply(const ConnectionPtr& c, Incoming&& m, Released& released) {
  ++replies_;
  const std::uint64_t id = m.header.call_id;
  if (Call* call = calls_.find(id)) {
    if (call->connection != c->id) return;  // only the peer that got the request may answer it
    if (call->status == CallStatus::kPending) {
      return complete(id, Completion{.status = CallStatus::kReplied, .reply = std::move(m)}, released);
    }
    if (call->keep_alive) released.push_back(std::move(call->keep_alive));
  }
  if (auto kept = keep_alives_.find(id); kept != keep_alives_.end()) {
    if (kept->second.connection != c->id) return;
    released.push_back(std::move(kept->second.owner));
    keep_alives_.erase(kept);
  }
  if (m.header.flags & kMustDeliver) orphan(c->peer, std::move(m));
}

void Engine::expire_calls(Nanos at, Released& released) {
  bool any = false;
  while (const std::uint64_t id = calls_.pop_expired(at)) {
    complete(id, Completion{.status = CallStatus::kTimedOut}, released);
    any = true;
  }
  if (any) interrupt_poll();  // the leader may wait for one of them
}

// ---- start and wait

/// Requires mutex_. Checks a message against the peer's limits; `id` is 0 for a one-way message. Returns true if it is
/// over the limits and is not sent; its call has failed then. If the peer counts on its trailer, it is sent without its
/// content, and the peer answers it.
bool Engine::reject_oversized(const Connection& c, std::uint64_t id, Outgoing& m, Released& released) {
  if (fits(m, c.limits)) return false;
  std::string why = over_limits(m, c.limits, c.handshake.peer().name);
  if (id == 0) {  // internal messages are never that large: a bug
    log("a message is not sent: " + why);
    return true;
  }
  if (m.header.flags & kMustDeliver && m.header.flags & kTrailer) {
    leave_out(m, LeftOut::kTooLarge, why);
    return false;
  }
  release_keep_alive(id, released);
  complete(id, Completion{.status = CallStatus::kTooLarge, .why = std::move(why)}, released);
  return true;
}

std::uint64_t Engine::start(std::int32_t peer, std::unique_ptr<Outgoing>&& m, CallOptions o) {
  Released released;
  const Nanos at = now();
  const bool async = o.target != nullptr;
  std::int64_t size = weight(m->payload_size());
  std::uint64_t id;
  ConnectionPtr link;
  bool straight = false;  // send to this link without looking up the peer again
  {
    std::lock_guard lock(mutex_);
    id = calls_.open(peer);
    Call& call = *calls_.find(id);
    call.is_async = async;
    call.must_send = m->header.flags & kMustDeliver;
    call.wait_for_connection = o.background && call.must_send;
    call.deferrable = o.deferrable;
    call.target = std::move(o.target);
    call.keep_alive = std::move(o.keep_alive);
    if (async) {
      if (!o.background) calls_.count_async(call);
      calls_.set_deadline(id, o.deadline);
      arm_timer(calls_.next_deadline());
    }
    if (stopping()) {
      complete(id, Completion{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, released);
      return id;
    }
    auto found = peers_.find(peer);
    if (found != peers_.end()) link = found->second.link;
    if (link && reject_oversized(*link, id, *m, released)) return id;
    size = weight(m->payload_size());  // `reject_oversized` may have removed the content
    if (link && window_open(*link, size)) {
      straight = true;
      call.connection = link->id;
    }
  }
  m->header.type = FrameType::kRequest;
  m->header.call_id = id;
  m->header.timeout = o.deadline == kNever ? 0 : std::max<Nanos>(o.deadline - at, 1);
  if (o.nested) m->header.flags |= kNested;

  if (link && !straight) {
    if (o.nested || o.never_wait) {
      count_over_window(*link, peer, size);
    } else {
      send_window(link);
      Waiter w;
      const WaitEnd end = wait_for(
          For::kProgress, w, [&] { return window_open(*link, size) || link->state == Connection::State::kClosed; },
          o.deadline, o.interrupted);
      if (end == WaitEnd::kDeadline || end == WaitEnd::kInterrupted) {  // the call is not made
        std::lock_guard lock(mutex_);
        complete(id, Completion{.status = CallStatus::kTimedOut}, released);
      }
    }
  }
  const bool borrowed = !m->segments.empty() && !m->immutable;
  Transmission p{.copy = o.never_wait, .may_coalesce = async, .before_blocking = &o.before_blocking};
  if (borrowed && o.never_wait && size > kLarge) p.copied_owner = copy_payload(*m);  // copy before any lock is held
  if (straight) p.connection = link;
  const SendResult result = straight ? transmit(link, m, p) : route(peer, m, p);
  if (result == SendResult::kQueued && borrowed && !p.copy) wait_until_sent(peer, p, o.deadline, o.interrupted);
  if (async && !has_leader_) {  // a leader sees the call when its term ends
    std::lock_guard lock(mutex_);
    if (has_leader_) return id;
    if (o.background || is_running_completions()) {  // a thread that runs completions polls for more when it is done
      arm_timer(now() + handoff_delay_);
    } else {
      watch_links();  // the pool must see the reply
    }
  }
  return id;
}

/// Requires mutex_. Takes a completion that is queued for the pool. A caller that waits for its calls in the order in
/// which they were made finds it among the first.
bool Engine::take_queued(std::uint64_t id, Completion& out, Released& released) {
  const auto end = urgent_.begin() + static_cast<std::ptrdiff_t>(std::min(urgent_.size(), kSearchDepth));
  const auto found = std::find_if(urgent_.begin(), end, [id](const WorkItem& i) {
    return i.kind == WorkKind::kCompletion && i.target && i.message.header.call_id == id;
  });
  if (found == end) return false;
  out = std::move(found->completion);
  released.push_back(std::move(found->target));
  if (found == urgent_.begin()) popped_at_ = completion_taken_at_ = now();  // otherwise the items before it still wait
  urgent_.erase(found);
  return true;
}

WaitEnd Engine::wait(std::uint64_t id, Nanos deadline, const std::function<bool()>& interrupted, Completion& out) {
  Waiter w;
  std::uint64_t link;
  Released released;
  {
    std::lock_guard lock(mutex_);
    Call* call = calls_.find(id);
    if (!call && forked_) {  // its completion went to the pool of the parent
      out = {.status = CallStatus::kStopped, .why = kForked};
      return WaitEnd::kDone;
    }
    if (!call && take_queued(id, out, released)) return WaitEnd::kDone;
    if (!call) flush_deferred();  // its completion may be deferred
    if (!call || call->waiter || call->wait_set) return WaitEnd::kStopped;
    call->waiter = &w;
    link = call->connection;
  }
  const WaitEnd end = wait_for(
      For::kReply, w,
      [&] {
        Call* call = calls_.find(id);
        return call->status != CallStatus::kPending;
      },
      deadline, interrupted, link);
  std::lock_guard lock(mutex_);
  Call* call = calls_.find(id);
  call->waiter = nullptr;
  if (call->status == CallStatus::kPending || end == WaitEnd::kInterrupted) return end;
  out = std::move(call->completion);
  close_call(id, out.status == CallStatus::kReplied, released);
  return WaitEnd::kDone;
}

void Engine::give_up(std::uint64_t id) {
  Released released;
  std::lock_guard lock(mutex_);
  Call* call = calls_.find(id);
  if (!call) return;
  const bool replied = call->status == CallStatus::kReplied;  // completed after the last `wait`
  if (replied && call->completion.reply.header.flags & kMustDeliver) {
    orphan(call->peer, std::move(call->completion.reply));
    wake_for_work();
  }
  close_call(id, replied, released);
}

bool Engine::take_deferred(WorkItem& out) {
  if (!has_deferred_.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex_);
  if (deferred_.empty()) return false;
  out = std::move(deferred_.front());
  deferred_.pop_front();
  has_deferred_.store(!deferred_.empty(), std::memory_order_relaxed);
  return true;
}

bool Engine::remove_completion(std::uint64_t id) {
  WorkItem item;
  std::lock_guard lock(mutex_);
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

void Engine::reply(std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing>&& m, bool may_wait,
                   const std::function<void()>& before_blocking) {
  ConnectionPtr c;
  bool more;  // other requests are waiting for a thread
  {
    std::lock_guard lock(mutex_);
    auto found = connections_.find(connection);
    if (found == connections_.end()) return;  // the caller has disconnected
    c = found->second;
    more = has_requests();
  }
  m->header.type = FrameType::kReply;
  m->header.call_id = call;
  if (!fits(*m, c->limits)) {
    leave_out(*m, LeftOut::kTooLarge, over_limits(*m, c->limits, c->handshake.peer().name));
  }
  PoolThread* self = may_wait && !m->segments.empty() && !c->stalled ? this_thread() : nullptr;
  Transmission p{.copy = !self, .may_coalesce = more, .before_blocking = &before_blocking, .connection = c};
  if (p.copy && weight(m->payload_size()) > kLarge) p.copied_owner = copy_payload(*m);
  if (transmit(c, m, p) == SendResult::kQueued && self) wait_until_reply_sent(*self, p);
}

std::uint64_t Engine::largest_body(std::uint64_t connection) const {
  std::lock_guard lock(mutex_);
  const auto found = connections_.find(connection);
  return found == connections_.end() ? UINT64_MAX : found->second->limits.body;  // without a connection it is dropped
}

bool Engine::send(std::int32_t peer, std::unique_ptr<Outgoing> m) {
  m->header.type = FrameType::kOneway;
  Transmission p{.copy = true};
  return route(peer, m, p) != SendResult::kBroken;
}

// ---- receiving

void Engine::on_message(const ConnectionPtr& c, Incoming&& m) {
  ++arrivals_;
  received_messages_.fetch_add(1, std::memory_order_relaxed);
  const FrameType type = m.header.type;
  if (is_handshake(type)) return on_handshake(c, type, m.body_view());
  if (c->state != Connection::State::kOpen)
    return close_connection(c, "it sent a message before it had proven its identity");
  if (m.header.credit) {
    c->outstanding.fetch_sub(static_cast<std::int64_t>(m.header.credit), std::memory_order_relaxed);
    if (c->over_window.load(std::memory_order_relaxed) > 0 && window_open(*c, 0)) c->over_window = 0;
    if (progress_waiters_.load(std::memory_order_acquire) > 0) {
      std::lock_guard lock(mutex_);
      notify_progress();
    }
  }
  std::shared_ptr<const Name> name;
  if (const std::uint32_t id = m.header.name_id) {
    if (!m.name.empty()) {
      c->names[id] = std::make_shared<const Name>(Name{std::move(m.name), nullptr});
    }
    auto found = c->names.find(id);
    if (found == c->names.end()) return close_connection(c, "it used a name that it never defined");
    name = found->second;
  }
  if (m.discarded > 0) explain(m, settings_.handshake.me.name, *pool_);
  if (type == FrameType::kReply) return unprocessed_replies_.push_back(std::move(m));
  process_replies(c);  // process messages in the order of arrival
  switch (type) {
    case FrameType::kRequest:
    case FrameType::kOneway: {
      WorkItem item;
      item.kind = type == FrameType::kRequest ? WorkKind::kRequest : WorkKind::kOneway;
      item.peer = c->peer;
      item.connection = c->id;
      item.name = std::move(name);
      item.since = now();
      item.deadline = deadline_after(item.since, m.header.timeout);
      item.message = std::move(m);
      std::lock_guard lock(mutex_);
      if (item.kind == WorkKind::kRequest) ++requests_;
      return push(std::move(item));
    }
    case FrameType::kCredit:
      if (m.header.call_id == 0) return;
      c->peer_window.store(static_cast<std::int64_t>(std::min<std::uint64_t>(m.header.call_id, INT64_MAX)),
                           std::memory_order_relaxed);
      return return_credit(c, 0);
    case FrameType::kGoodbye: {  // for all connections to the peer: it may not have sent a goodbye on each
      std::lock_guard lock(mutex_);
      for (auto& [token, other] : connections_) {
        const bool same = other->handshake.peer().incarnation == c->handshake.peer().incarnation;
        if (other->peer == c->peer && same) other->goodbye = true;
      }
      return;
    }
    default:
      return close_connection(c, "it sent a frame of unknown type " + std::to_string(static_cast<int>(type)));
  }
}

}  // namespace telegrad

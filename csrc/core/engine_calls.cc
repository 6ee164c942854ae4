// Calls: start, wait, matching of replies, and processing of received messages.
#include <algorithm>
#include <cstring>

#include "core/engine.h"
#include "core/left_out.h"

namespace telegrad {
namespace {

constexpr std::size_t kAmongFirst = 4;
constexpr std::int64_t kLarge = 64 << 10;  // larger payloads are not copied under a lock

/// Returns the error text for a message for which this worker had no memory.
void explain(Incoming& m, const std::string& me, Pool& pool) {
  const std::string text = static_cast<char>(LeftOut::kNoMemory) +
                           ("worker " + me + " has no memory for a message of ") + std::to_string(m.discarded) +
                           " bytes.";
  m.header.flags |= kLeftOut;
  m.body = pool.allocate(text.size());
  std::memcpy(m.body->data(), text.data(), text.size());
}

}  // namespace

// ---- completions

/// Requires mutex_. Closes a call. Its `linger` is kept if no reply has arrived.
void Engine::close_call(std::uint64_t id, bool replied, Kept& kept) {
  Call* call = calls_.find(id);
  if (call->cookie) kept.push_back(std::move(call->cookie));
  if (call->linger) {
    const bool over = call->status != CallStatus::kPending && call->status != CallStatus::kTimedOut;
    const bool unsent = call->connection == 0 && call->must_send && !over;
    if (replied || (!unsent && !connections_.contains(call->connection))) {  // no late reply can arrive
      kept.push_back(std::move(call->linger));
    } else {
      lingering_.emplace(id, Lingering{call->connection, std::move(call->linger)});
    }
  }
  calls_.close(id);
}

/// Requires mutex_. Releases the `linger` of a call, because no late reply can arrive.
void Engine::stop_lingering(std::uint64_t id, Kept& kept) {
  auto found = lingering_.find(id);
  if (found == lingering_.end()) return;
  kept.push_back(std::move(found->second.keep));
  lingering_.erase(found);
}

/// Requires mutex_. Passes a completion to the waiting thread, to a wait set, or to the pool.
void Engine::settle(std::uint64_t id, Outcome&& outcome, Kept& kept) {
  Call* call = calls_.find(id);
  if (!call || call->status != CallStatus::kPending) return;
  const bool replied = outcome.status == CallStatus::kReplied;
  outcome.peer = call->peer;
  call->status = outcome.status;
  calls_.clear_deadline(*call);
  if (call->collected && !call->waiter) {
    Item item;
    item.kind = ItemKind::kOutcome;
    item.peer = call->peer;
    item.message.header.call_id = id;  // for `withdraw`
    item.cookie = std::move(call->cookie);
    item.outcome = std::move(outcome);
    const bool lazy = call->aside && replied;
    Collector* const collector = call->collector;
    close_call(id, replied, kept);
    if (collector) {
      --collector->expected;
      collector->outcomes.push_back(std::move(item));
      collector->waiter.bell.ring();
      if (!replied) kick();  // the waiter may be the leader
      return;
    }
    if (lazy) {
      item.since = now();
      lazy_.push_back(std::move(item));
      has_lazy_.store(true, std::memory_order_relaxed);
      return arm_timer(lazy_.front().since + kLazyGrace);
    }
    push(std::move(item));
    if (!replied) wake_for_work();  // the reader of a reply does this itself; for the rest, this may be any thread
    return;
  }
  call->outcome = std::move(outcome);
  if (!call->waiter) return;
  call->waiter->bell.ring();
  if (!replied) kick();  // the waiter may be the leader
}

/// Requires mutex_. Queues a reply that no thread waits for, because it carries references that must be released.
void Engine::orphan(std::int32_t peer, Incoming&& m) {
  Item item;
  item.kind = ItemKind::kOutcome;
  item.peer = peer;
  item.outcome = Outcome{.status = CallStatus::kReplied, .reply = std::move(m), .peer = peer};
  push(std::move(item));
}

/// Processes the replies of one read under one lock.
void Engine::take_in_answers(const ConnectionPtr& c) {
  if (answers_.empty()) return;
  Kept kept;
  {
    std::lock_guard lock(mutex_);
    for (Incoming& m : answers_) on_reply(c, std::move(m), kept);
  }
  answers_.clear();
}

/// Requires mutex_.
void Engine::on_reply(const ConnectionPtr& c, Incoming&& m, Kept& kept) {
  ++replies_;
  const std::uint64_t id = m.header.call_id;
  if (Call* call = calls_.find(id)) {
    if (call->connection != c->id) return;  // only the peer that got the request may answer it
    if (call->status == CallStatus::kPending) {
      return settle(id, Outcome{.status = CallStatus::kReplied, .reply = std::move(m)}, kept);
    }
    if (call->linger) kept.push_back(std::move(call->linger));
  }
  if (auto late = lingering_.find(id); late != lingering_.end()) {
    if (late->second.connection != c->id) return;
    kept.push_back(std::move(late->second.keep));
    lingering_.erase(late);
  }
  if (m.header.flags & kMayLinger) orphan(c->peer, std::move(m));
}

void Engine::expire_calls(Nanos at, Kept& kept) {
  bool any = false;
  while (const std::uint64_t id = calls_.pop_expired(at)) {
    settle(id, Outcome{.status = CallStatus::kTimedOut}, kept);
    any = true;
  }
  if (any) kick();  // the leader may wait for one of them
}

// ---- start and wait

/// Requires mutex_. Checks a message against the peer's limits; `id` is 0 for a one-way message. Returns true if it is
/// over the limits and is not sent; its call has failed then. If the peer counts on its trailer, it is sent without its
/// content, and the peer answers it.
bool Engine::refused(const Connection& c, std::uint64_t id, Outgoing& m, Kept& kept) {
  if (fits(m, c.limits)) return false;
  std::string why = over_limits(m, c.limits, c.handshake.peer().name);
  if (id == 0) {  // internal messages are never that large: a bug
    log("a message is not sent: " + why);
    return true;
  }
  if (m.header.flags & kMayLinger && m.header.flags & kTrailer) {
    leave_out(m, LeftOut::kTooLarge, why);
    return false;
  }
  stop_lingering(id, kept);
  settle(id, Outcome{.status = CallStatus::kTooLarge, .why = std::move(why)}, kept);
  return true;
}

std::uint64_t Engine::start(std::int32_t peer, std::unique_ptr<Outgoing>&& m, CallOptions o) {
  Kept kept;
  const Nanos at = now();
  const bool async = o.cookie != nullptr;
  std::int64_t size = weight(m->payload_size());
  std::uint64_t id;
  ConnectionPtr link;
  bool straight = false;  // send to this link without looking up the peer again
  {
    std::lock_guard lock(mutex_);
    id = calls_.open(peer);
    Call& call = *calls_.find(id);
    call.collected = async;
    call.must_send = m->header.flags & kMayLinger;
    call.patient = o.lazy && call.must_send;
    call.aside = o.aside;
    call.cookie = std::move(o.cookie);
    call.linger = std::move(o.linger);
    if (async) {
      if (!o.lazy) calls_.count_async(call);
      calls_.set_deadline(id, o.deadline);
      arm_timer(calls_.next_deadline());
    }
    if (stopping()) {
      settle(id, Outcome{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, kept);
      return id;
    }
    auto found = peers_.find(peer);
    if (found != peers_.end()) link = found->second.link;
    if (link && refused(*link, id, *m, kept)) return id;
    size = weight(m->payload_size());  // `refused` may have removed the content
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
      pass_window(*link, peer, size);
    } else {
      tell_window(link);
      Waiter w;
      const WaitEnd end = wait_for(
          For::kProgress, w, [&] { return window_open(*link, size) || link->state == Connection::State::kDead; },
          o.deadline, o.interrupted);
      if (end == WaitEnd::kDeadline || end == WaitEnd::kInterrupted) {  // the call is not made
        std::lock_guard lock(mutex_);
        settle(id, Outcome{.status = CallStatus::kTimedOut}, kept);
      }
    }
  }
  const bool lent = !m->segments.empty() && !m->owned;
  Passage p{.own = o.never_wait, .may_gather = async, .before_blocking = &o.before_blocking};
  if (lent && o.never_wait && size > kLarge) p.spent = own_memory(*m);  // copy before any lock is held
  if (straight) p.via = link;
  const Sent sent = straight ? transmit(link, m, p) : route(peer, m, p);
  if (sent == Sent::kQueued && lent && !p.own) wait_until_gone(peer, p, o.deadline, o.interrupted);
  if (async && !role_held_) {  // a leader sees the call when its term ends
    std::lock_guard lock(mutex_);
    if (role_held_) return id;
    if (o.lazy || finishes_calls()) {  // a thread that runs completions polls for more when it is done
      arm_timer(now() + grace_);
    } else {
      watch();  // the pool must see the reply
    }
  }
  return id;
}

/// Requires mutex_. Takes a completion that is queued for the pool. A caller that waits for its calls in the order in
/// which they were made finds it among the first.
bool Engine::take_back(std::uint64_t id, Outcome& out, Kept& kept) {
  const auto end = urgent_.begin() + static_cast<std::ptrdiff_t>(std::min(urgent_.size(), kAmongFirst));
  const auto found = std::find_if(urgent_.begin(), end, [id](const Item& i) {
    return i.kind == ItemKind::kOutcome && i.cookie && i.message.header.call_id == id;
  });
  if (found == end) return false;
  out = std::move(found->outcome);
  kept.push_back(std::move(found->cookie));
  if (found == urgent_.begin()) popped_at_ = finished_at_ = now();  // otherwise the items before it still wait
  urgent_.erase(found);
  return true;
}

WaitEnd Engine::wait(std::uint64_t id, Nanos deadline, const std::function<bool()>& interrupted, Outcome& out) {
  Waiter w;
  std::uint64_t link;
  Kept kept;
  {
    std::lock_guard lock(mutex_);
    Call* call = calls_.find(id);
    if (!call && forked_) {  // its completion went to the pool of the parent
      out = {.status = CallStatus::kStopped, .why = kForked};
      return WaitEnd::kDone;
    }
    if (!call && take_back(id, out, kept)) return WaitEnd::kDone;
    if (!call) hurry_lazy();  // its completion may be deferred
    if (!call || call->waiter || call->collector) return WaitEnd::kStopped;
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
  out = std::move(call->outcome);
  close_call(id, out.status == CallStatus::kReplied, kept);
  return WaitEnd::kDone;
}

void Engine::give_up(std::uint64_t id) {
  Kept kept;
  std::lock_guard lock(mutex_);
  Call* call = calls_.find(id);
  if (!call) return;
  const bool replied = call->status == CallStatus::kReplied;  // completed after the last `wait`
  if (replied && call->outcome.reply.header.flags & kMayLinger) {
    orphan(call->peer, std::move(call->outcome.reply));
    wake_for_work();
  }
  close_call(id, replied, kept);
}

bool Engine::take_lazy(Item& out) {
  if (!has_lazy_.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex_);
  if (lazy_.empty()) return false;
  out = std::move(lazy_.front());
  lazy_.pop_front();
  has_lazy_.store(!lazy_.empty(), std::memory_order_relaxed);
  return true;
}

bool Engine::withdraw(std::uint64_t id) {
  Item item;
  std::lock_guard lock(mutex_);
  for (auto* queue : {&urgent_, &lazy_}) {
    auto found = std::find_if(queue->begin(), queue->end(), [&](const Item& i) {
      return i.kind == ItemKind::kOutcome && i.cookie && i.message.header.call_id == id;
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
  Passage p{.own = !self, .may_gather = more, .before_blocking = &before_blocking, .via = c};
  if (p.own && weight(m->payload_size()) > kLarge) p.spent = own_memory(*m);
  if (transmit(c, m, p) == Sent::kQueued && self) wait_while_it_leaves(*self, p);
}

std::uint64_t Engine::largest_body(std::uint64_t connection) const {
  std::lock_guard lock(mutex_);
  const auto found = connections_.find(connection);
  return found == connections_.end() ? UINT64_MAX : found->second->limits.body;  // without a connection it is dropped
}

bool Engine::send(std::int32_t peer, std::unique_ptr<Outgoing> m) {
  m->header.type = FrameType::kOneway;
  Passage p{.own = true};
  return route(peer, m, p) != Sent::kBroken;
}

// ---- receiving

void Engine::on_message(const ConnectionPtr& c, Incoming&& m) {
  ++arrivals_;
  received_messages_.fetch_add(1, std::memory_order_relaxed);
  const FrameType type = m.header.type;
  if (is_handshake(type)) return on_handshake(c, type, m.body_view());
  if (c->state != Connection::State::kOpen) return lost(c, "it sent a message before it had proven its identity");
  if (m.header.credit) {
    c->outstanding.fetch_sub(static_cast<std::int64_t>(m.header.credit), std::memory_order_relaxed);
    if (c->past_window.load(std::memory_order_relaxed) > 0 && window_open(*c, 0)) c->past_window = 0;
    if (progress_waiters_.load(std::memory_order_acquire) > 0) {
      std::lock_guard lock(mutex_);
      ring_progress();
    }
  }
  std::shared_ptr<const Name> name;
  if (const std::uint32_t id = m.header.name_id) {
    if (!m.name.empty()) {
      c->names[id] = std::make_shared<const Name>(Name{std::move(m.name), nullptr});
    }
    auto found = c->names.find(id);
    if (found == c->names.end()) return lost(c, "it used a name that it never defined");
    name = found->second;
  }
  if (m.discarded > 0) explain(m, settings_.credo.me.name, *pool_);
  if (type == FrameType::kReply) return answers_.push_back(std::move(m));
  take_in_answers(c);  // process messages in the order of arrival
  switch (type) {
    case FrameType::kRequest:
    case FrameType::kOneway: {
      Item item;
      item.kind = type == FrameType::kRequest ? ItemKind::kRequest : ItemKind::kOneway;
      item.peer = c->peer;
      item.connection = c->id;
      item.name = std::move(name);
      item.since = now();
      item.deadline = deadline_after(item.since, m.header.timeout);
      item.message = std::move(m);
      std::lock_guard lock(mutex_);
      if (item.kind == ItemKind::kRequest) ++requests_;
      return push(std::move(item));
    }
    case FrameType::kCredit:
      if (m.header.call_id == 0) return;
      c->peer_window.store(static_cast<std::int64_t>(std::min<std::uint64_t>(m.header.call_id, INT64_MAX)),
                           std::memory_order_relaxed);
      return take_up(c, 0);
    case FrameType::kGoodbye: {  // for all connections to the peer: it may not have sent a goodbye on each
      std::lock_guard lock(mutex_);
      for (auto& [token, other] : connections_) {
        const bool same = other->handshake.peer().incarnation == c->handshake.peer().incarnation;
        if (other->peer == c->peer && same) other->goodbye = true;
      }
      return;
    }
    default:
      return lost(c, "it sent a frame of unknown type " + std::to_string(static_cast<int>(type)));
  }
}

}  // namespace telegrad

// Polling of links by the leader, and dispatch of what arrives.
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/engine_parts.h"
#include "core/leader.h"
#include "core/left_out.h"
#include "core/wakeup_fd.h"

namespace telegrad {
namespace {

int milliseconds(Nanos until) {
  if (until == kNever) return -1;
  const Nanos left = until - now();
  return left <= 0 ? 0 : static_cast<int>(std::min<Nanos>((left + kMillisecond - 1) / kMillisecond, 1'000'000'000));
}

/// Sets the error text for the caller in a message for which this worker had no memory.
void set_no_memory_error(Incoming& m, const std::string& worker, BufferPool& buffers) {
  const std::string text = static_cast<char>(LeftOut::kNoMemory) +
                           ("worker " + worker + " has no memory for a message of ") + std::to_string(m.discarded) +
                           " bytes.";
  m.header.flags |= kLeftOut;
  m.body = buffers.allocate(text.size());
  std::memcpy(m.body->data(), text.data(), text.size());
}

/// Records a name of the peer. Returns false if it has too many.
bool define_name(Connection& c, std::uint32_t id, std::string text) {
  if (id > kTransientName) return false;
  std::shared_ptr<const Name>& name = c.names[id];
  if (name && name->text == text) return true;
  c.name_bytes += text.size();
  if (name) c.name_bytes -= name->text.size();
  if (c.name_bytes > kMaxNameBytes + Limits{}.name) return false;
  name = std::make_shared<const Name>(Name{std::move(text), nullptr});
  c.names_of_peer.store(static_cast<std::uint32_t>(c.names.size()), std::memory_order_relaxed);
  return true;
}

}  // namespace

/// Busy polls the connection on which the leader is about to wait, so that the peer need not wake it.
void Leader::enable_busy_poll_for(std::uint64_t connection) {
  ConnectionPtr c = last_active_ && last_active_->id == connection ? last_active_ : nullptr;
  if (!c) c = parts_.peers.find_connection(connection);
  if (c && !c->busy_polled) enable_busy_poll(c);
}

void Leader::enable_busy_poll(const ConnectionPtr& c) {
  if (!c->link->enable_busy_poll()) return;
  c->busy_polled = true;
  busy_polled_.push_back(c);
}

/// Arms the wake-up of all busy-polled links. Returns false if one of them already has a message.
bool Leader::arm_wakeups() {
  std::erase_if(busy_polled_, [](const ConnectionPtr& c) {
    const bool asleep = c->state == Connection::State::kClosed || c->link->arm_wakeup();
    if (asleep) c->busy_polled = false;
    return asleep;
  });
  return busy_polled_.empty();
}

/// Does what other threads have left for the leader. Inline: it runs after every poll.
inline void Leader::after_poll() {
  if (has_closed_.load(std::memory_order_relaxed)) [[unlikely]]
    reap_closed();
  if (parts_.peers.has_resumable()) [[unlikely]]
    parts_.peers.resume_handshakes();
}

/// Polls until something happens, spinning first if that pays. Returns false if nothing did before `until`, or if a
/// caller has taken leadership from the pool thread of this term.
bool Leader::poll(Spin& spin, Nanos until, bool may_block, LeaderHandoff::Term term) {
  const Nanos start = now();
  const Nanos stop = std::min(until, start + spin.budget());
  Nanos at = start;
  for (std::uint32_t turn = 1;; ++turn, at = now()) {
    if (parts_.timer.is_due(at)) parts_.timer.run(parts_.mutex);
    if (at >= stop) break;
    if (at - parts_.sender.coalescing_since() >= kCoalesceDelay) parts_.sender.flush_coalesced();
    if (!handoff_.begin_poll(term)) return false;
    const bool found = poll_once(turn);
    after_poll();
    const std::uint32_t polls_per_yield = busy_polled_.empty() ? kYieldEvery : kYieldEveryMemoryPolls;
    handoff_.end_poll(term);
    if (found) {
      spin.hit(now() - start);
      return true;
    }
    if (turn >= kLastActivePolls && turn % polls_per_yield == 0 && !Spin::yield()) break;
  }
  if (parts_.sender.has_coalesced()) parts_.sender.flush_coalesced();
  if (!may_block) {
    if (!handoff_.begin_poll(term)) return false;
    const bool found = poll_fds(0);
    after_poll();
    handoff_.end_poll(term);
    return found;
  }
  const bool found = poll_fds(milliseconds(until));
  after_poll();
  if (found) spin.slept(now() - start);
  return found;
}

/// Polls once while spinning. Most of these polls read only the links that were active last.
bool Leader::poll_once(std::uint32_t turn) {
  if (parts_.sender.exchange_can_continue()) return poll_fds(0);
  if (!busy_polled_.empty() && ++memory_polls_ % kMemoryPolls != 0) {
    const bool found = poll_memory();
    if (found || !last_active_ || last_active_->busy_polled) return found;
  }
  return last_active_ && !last_active_->busy_polled && (turn < kLastActivePolls || turn % 4 != 0)
             ? read_from(last_active_)
             : poll_fds(0);
}

/// Polls the busy-polled links without a system call; returns whether one of them had data.
bool Leader::poll_memory() {
  bool found = false;
  for (std::size_t i = 0; i < busy_polled_.size(); ++i) {
    if (!busy_polled_[i]->link->ready()) continue;
    const ConnectionPtr c = busy_polled_[i];
    found = read_from(c) || found;
  }
  return found;
}

/// Polls every link; returns whether anything happened.
bool Leader::poll_fds(int timeout_ms) {
  bool received = poll_memory();
  if (!received && timeout_ms != 0 && !arm_wakeups()) received = poll_memory();
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  const int n = epoll_wait(links_epoll_.get(), events, kEvents, received ? 0 : timeout_ms);
  for (int i = 0; i < n; ++i) {
    const std::uint64_t token = events[i].data.u64;
    if (token == kInterruptToken) {
      drain_fd(interrupt_fd_.get());
      continue;
    }
    if (token == kCallbackToken) {
      drain_fd(callback_fd_.get());
      callback_requested_.store(false, std::memory_order_release);
      WorkItem item;
      item.kind = WorkKind::kEvent;
      item.event = EventKind::kCallback;
      Lock lock(parts_.mutex);
      parts_.queue.push(std::move(item));
      continue;
    }
    ConnectionPtr c;
    std::shared_ptr<Listener> listener;
    const bool lanes = token & kLanesBit;
    {
      Lock lock(parts_.mutex);
      c = parts_.peers.find_connection(token & ~kLanesBit);
      if (!c) listener = parts_.peers.find_listener(token);
    }
    if (listener) parts_.peers.accept_from(*listener);
    if (!c) continue;
    if (lanes) c->link->poll_lanes();
    if (lanes || events[i].events & EPOLLOUT) parts_.sender.on_writable(c);
    if (events[i].events & ~static_cast<std::uint32_t>(EPOLLOUT)) {
      if (read_from(c)) last_active_ = c;
    }
  }
  count_read(n, kEvents);
  return received || n > 0;
}

/// Counts a poll that returned at most `most` events. The system serves ready descriptors in turn, so as many events as
/// there are descriptors include one of each that was ready.
void Leader::count_read(int events, int most) {
  events_since_read_ += std::max(events, 0);
  if (events == most && events_since_read_ < watched_.load(std::memory_order_relaxed)) return;
  events_since_read_ = 0;
  reads_.fetch_add(1, std::memory_order_relaxed);
}

/// Reads one link; returns whether it had data.
bool Leader::read_from(const ConnectionPtr& c) {
  class Arrivals final : public Inbox {
   public:
    Arrivals(Leader& leader, const ConnectionPtr& c) : leader_(leader), c_(c) {}
    BlockPtr allocate(std::size_t size) override { return leader_.parts_.buffers->allocate(size); }
    BlockPtr adopt(BlockPtr leased) override { return leader_.parts_.buffers->adopt(std::move(leased)); }
    void deliver(Incoming&& m) override {
      large = large || (!m.segments.empty() && m.segments.back()->size() >= kLargeTensor);
      leader_.on_message(c_, std::move(m));
    }
    bool large = false;

   private:
    Leader& leader_;
    const ConnectionPtr& c_;
  };
  const std::uint64_t before = arrivals_;
  Arrivals arrivals(*this, c);
  const ReceiveState state = c->link->receive(arrivals, kReadBudget);
  parts_.calls.process_replies(c);
  parts_.canceler.process(c);
  if (parts_.peers.has_new_lane_links()) {  // data that arrived right after a new lane
    for (const ConnectionPtr& other : parts_.peers.take_new_lane_links()) read_from(other);
  }
  if (state == ReceiveState::kBroken) {
    parts_.peers.on_broken(c);
    return true;
  }
  if (state == ReceiveState::kToSend) parts_.sender.on_writable(c);
  if (arrivals.large) parts_.peers.open_lanes(c);
  if (arrivals_ == before) return false;
  if (!c->busy_polled) enable_busy_poll(c);
  return true;
}

/// Answers even if a large message is being sent: the peer then receives that.
void Leader::answer_ping(const ConnectionPtr& c) {
  auto pong = std::make_unique<Outgoing>();
  pong->header.type = FrameType::kPong;
  parts_.sender.transmit(c, std::move(pong));
}

/// Reads the links on the timer thread if no other thread does.
void Leader::read_for_timer() {
  {
    Lock lock(parts_.mutex);
    if (has_leader_ || parked_ || !unread_ || now() - released_at_ < kUnreadTimeout) return;
    become_leader();
  }
  const Nanos until = now() + kTimerReads;
  while (poll_fds(0) && now() < until) {
  }
  after_poll();
  Lock lock(parts_.mutex);
  parts_.queue.wake_for_work();  // a thread may have parked while this one was the leader
  resign(false);
}

void Leader::on_message(const ConnectionPtr& c, Incoming&& m) {
  ++arrivals_;
  received_messages_.fetch_add(1, std::memory_order_relaxed);
  const FrameType type = m.header.type;
  if (is_handshake(type)) return parts_.peers.on_handshake(c, type, m.body_view());
  if (c->state != Connection::State::kOpen)
    return parts_.peers.close_connection(c, "it sent a message before it had proven its identity");
  if (m.header.credit) {
    c->outstanding.fetch_sub(static_cast<std::int64_t>(m.header.credit), std::memory_order_relaxed);
    if (c->over_window.load(std::memory_order_relaxed) > 0 && parts_.sender.window_open(*c, 0)) c->over_window = 0;
    if (progress_waiters_.load(std::memory_order_acquire) > 0) {
      Lock lock(parts_.mutex);
      notify_progress();
    }
  }
  std::shared_ptr<const Name> name;
  if (const std::uint32_t id = m.header.name_id) {
    if (m.name && !define_name(*c, id, std::move(*m.name))) {
      return parts_.peers.close_connection(c, "it defined more than " + std::to_string(kMaxNames) + " names, or " +
                                                  std::to_string(kMaxNameBytes) + " bytes of names");
    }
    auto found = c->names.find(id);
    if (found == c->names.end()) return parts_.peers.close_connection(c, "it used a name that it never defined");
    name = found->second;
  }
  const std::uint64_t size = parts_.overload.record_size(m);
  if (m.discarded > 0) set_no_memory_error(m, parts_.settings.handshake.me.name, *parts_.buffers);
  if (type == FrameType::kReply) {
    const std::int64_t before = c->in_flight.fetch_sub(1, std::memory_order_relaxed);
    return parts_.calls.add_reply(std::move(m), before >= c->max_in_flight);
  }
  parts_.calls.process_replies(c);  // process messages in the order of arrival
  switch (type) {
    case FrameType::kRequest:
    case FrameType::kOneway: {
      if (type == FrameType::kRequest) {
        if (!parts_.overload.count_request(*c)) [[unlikely]]
          return parts_.peers.close_connection(c, parts_.overload.flood_reason());
        parts_.overload.check_depth(m);
      }
      WorkItem item;
      item.kind = type == FrameType::kRequest ? WorkKind::kRequest : WorkKind::kOneway;
      item.peer = c->peer;
      item.connection = c->id;
      item.name = std::move(name);
      item.since = now();
      item.deadline = deadline_after(m.begun > 0 ? m.begun : item.since, m.header.timeout);
      item.message = std::move(m);
      {
        Lock lock(parts_.mutex);
        if (item.kind != WorkKind::kRequest) return parts_.queue.push(std::move(item));
        if (parts_.overload.admit_bytes(*c, item.message.header.call_id, weight(size))) [[likely]]
          return parts_.queue.push_request(std::move(item));
      }
      return parts_.peers.close_connection(c, parts_.overload.bytes_reason());
    }
    case FrameType::kCredit:
      if (m.header.call_id == 0) return;
      c->peer_window.store(static_cast<std::int64_t>(std::min<std::uint64_t>(m.header.call_id, INT64_MAX)),
                           std::memory_order_relaxed);
      return parts_.sender.return_credit(c, 0);
    case FrameType::kCancel:
      return parts_.canceler.add(m.header);
    case FrameType::kCallState:
      return parts_.calls.on_state(*c, m.header.call_id, static_cast<CallState>(m.header.tag));
    case FrameType::kPing:
      return answer_ping(c);
    case FrameType::kPong:
      return;  // its arrival says it all
    case FrameType::kGoodbye:
      return parts_.peers.on_goodbye(*c);
    default:
      return parts_.peers.close_connection(c,
                                           "it sent a frame of unknown type " + std::to_string(static_cast<int>(type)));
  }
}

}  // namespace telegrad

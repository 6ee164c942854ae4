// Peers: listening, connecting on first use, handshakes, and the end of connections.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr Nanos kMinRetryDelay = 5 * kMillisecond;  // first pause before an address is tried again
constexpr Nanos kMaxRetryDelay = 500 * kMillisecond;

/// Transient errors: the worker may still be at the address, but the worker or the network is busy. All other errors,
/// above all a refused connection, mean that the worker is not there.
constexpr int kTransientErrors[] = {EAGAIN,     EINTR,        ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ENETDOWN,
                                    ECONNRESET, ECONNABORTED, EPIPE,     EMFILE,       ENFILE,      ENOBUFS,   ENOMEM};

bool is_transient(int error) {
  return std::find(std::begin(kTransientErrors), std::end(kTransientErrors), error) != std::end(kTransientErrors);
}

/// Returns whether the error text of a link is transient; so is a plain end of stream.
bool is_transient(const std::string& why) {
  return why.empty() || std::any_of(std::begin(kTransientErrors), std::end(kTransientErrors),
                                    [&](int error) { return why.ends_with(std::generic_category().message(error)); });
}

}  // namespace

void Engine::set_peer(PeerAddress address) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[address.identity.id];
  peer.identity = std::move(address.identity);
  peer.addresses = std::move(address.addresses);
  peer.next_address = 0;
  peer.removed = false;
}

void Engine::remove_peer(std::int32_t id, const std::string& why) {
  Released released;
  std::vector<ConnectionPtr> links;
  {
    std::lock_guard lock(mutex_);
    auto found = peers_.find(id);
    if (found == peers_.end()) return;
    found->second.removed = true;
    found->second.last_error = why;
    for (auto& [token, c] : connections_) {
      if (c->peer == id) links.push_back(c);
    }
    unreachable(found->second, why, released);
  }
  for (auto& c : links) close_connection(c, why);
}

void Engine::disconnect(std::int32_t id, const std::string& why) {
  std::vector<ConnectionPtr> open;
  {
    std::lock_guard lock(mutex_);
    for (auto& [token, c] : connections_) {
      if (c->peer == id && c->state == Connection::State::kOpen) open.push_back(c);
    }
  }
  for (auto& c : open) {
    c->goodbye = true;
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kGoodbye;
    transmit(c, std::move(m));  // if it cannot be sent at once, the peer sees a lost connection
  }
  remove_peer(id, why);
}

// ---- connecting

ConnectionPtr Engine::add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator) {
  const int fd = link->fd();
  link->set_limits(kHandshakeLimits);
  auto c = std::make_shared<Connection>(next_token_++, std::move(link), std::move(handshake), initiator);
  c->handshake_deadline = now() + settings_.handshake_timeout;
  connections_.emplace(c->id, c);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = c->id}};
  epoll_ctl(links_epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  arm_handshake_timer(c->handshake_deadline);
  return c;
}

/// Requires mutex_, and releases it while HELLO is sent. Tries the addresses of the peer, starting after the last one.
void Engine::connect(Lock& lock, Peer& peer) {
  const Nanos at = now();
  if (!peer.connecting) {
    peer.connecting = true;
    peer.slow = false;
    peer.next_address = 0;
    peer.retry_after = kMinRetryDelay;
    peer.last_error = peer.addresses.empty() ? "its address is unknown" : "";
  }
  Released released;
  while (peer.next_address < peer.addresses.size()) {
    const std::string address = peer.addresses[peer.next_address++];
    Transport* transport = find_transport(address);
    if (!transport) {
      peer.last_error = "no transport for the address " + address;
      continue;
    }
    try {
      auto link = transport->connect(address);
      Handshake handshake = Handshake::initiate(settings_.handshake, peer.identity);
      const Handshake::Step hello = handshake.begin();
      auto c = add_connection(std::move(link), std::move(handshake), true);
      c->peer = peer.identity.id;
      lock.unlock();
      transmit(c, frame(hello));  // the leader is notified of a failure
      lock.lock();
      if (!has_leader_) watch_links();
      return;
    } catch (const std::system_error& e) {
      peer.last_error = e.what();
      peer.slow = peer.slow || is_transient(e.code().value());
    }
  }
  if (peer.slow) {
    peer.connecting = !peer.pending.empty();
    if (!peer.connecting) return;
    peer.slow = false;
    peer.next_address = 0;
    peer.retry_at = at + peer.retry_after;
    peer.retry_after = std::min(2 * peer.retry_after, kMaxRetryDelay);
    return arm_handshake_timer(peer.retry_at);
  }
  unreachable(peer, peer.last_error, released);
  lock.unlock();
  released.clear();
  lock.lock();
}

/// Requires mutex_. Fails all messages that wait for a connection, because the peer is unreachable or removed.
void Engine::unreachable(Peer& peer, const std::string& why, Released& released) {
  peer.connecting = false;
  peer.retry_at = kNever;
  auto pending = std::exchange(peer.pending, {});
  for (auto& w : pending) fail_pending(std::move(w), why, released);
  if (!pending.empty() && !peer.link && !peer.removed && !stopping()) {
    peer.was_lost = true;
    WorkItem item;
    item.kind = WorkKind::kEvent;
    item.event = EventKind::kPeerLost;
    item.peer = peer.identity.id;
    item.incarnation = peer.identity.incarnation;
    item.text = why;
    queue_peer_event(std::move(item));
  }
  notify_progress();
}

/// Requires mutex_. Drops a message that will not be sent.
void Engine::fail_pending(Peer::PendingMessage&& pending, const std::string& why, Released& released) {
  struct Message final : KeepAlive {
    std::unique_ptr<Outgoing> m;
  };
  auto owner = std::make_unique<Message>();
  owner->m = std::move(pending.message);
  if (owner->m->header.type == FrameType::kRequest) {
    complete(owner->m->header.call_id, Completion{.status = CallStatus::kUnreachable, .why = why}, released);
    release_keep_alive(owner->m->header.call_id, released);
  }
  if (owner->m->pending_send) owner->m->pending_send->done = true;
  released.push_back(std::move(owner));
}

/// Requires mutex_. Fails calls that have waited for a connection for connect_timeout. The peer may still be alive, so
/// messages that must be delivered stay queued.
void Engine::expire_pending(Peer& peer, Nanos at, Released& released) {
  std::deque<Peer::PendingMessage> expired;
  bool any = false;
  const std::string why = "no connection to worker " + peer.identity.name + " within connect_timeout: " +
                          (peer.last_error.empty() ? "it does not answer" : peer.last_error);
  std::erase_if(peer.pending, [&](Peer::PendingMessage& w) {
    if (w.until > at) {
      arm_handshake_timer(w.until);
      return false;
    }
    any = true;
    if (!(w.message->header.flags & kMustDeliver)) {
      expired.push_back(std::move(w));
      return true;
    }
    w.until = kNever;
    if (w.message->pending_send) w.message->pending_send->expired = true;
    complete(w.message->header.call_id, Completion{.status = CallStatus::kUnreachable, .why = why}, released);
    return false;
  });
  if (!any) return;
  if (peer.pending.empty() && std::exchange(peer.retry_at, kNever) != kNever) peer.connecting = false;
  for (auto& w : expired) fail_pending(std::move(w), why, released);
  notify_progress();
}

// ---- the handshake

void Engine::on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body) {
  if (c->state != Connection::State::kHandshaking) return close_connection(c, "it repeated the handshake");
  if (c->initiator && !c->user_checked) {  // accepted connections were checked on arrival
    if (const auto why = rejection_reason(peer_credentials_of(*c->link))) return close_connection(c, *why);
    c->user_checked = true;
  }
  Handshake::Step step;
  try {
    step = c->handshake.on_frame(type, body);
  } catch (const std::exception& e) {  // no random bytes
    return close_connection(c, e.what());
  }
  if (step.send) {
    if (transmit(c, frame(step)) == SendResult::kBroken) return;
  }
  if (!step.failed.empty()) return close_connection(c, step.failed);
  if (step.open && c->handshake.for_lane()) return attach_lane(c);
  if (step.open) on_open(c);  // after the welcome, which must be the first frame on the link
}

void Engine::on_open(const ConnectionPtr& c) {
  std::deque<Peer::PendingMessage> pending, expired;
  Released released;
  bool stale = false;
  std::unique_lock sending(c->send_mutex);  // waiting messages are sent before new ones
  {
    std::lock_guard lock(mutex_);
    const Identity& who = c->handshake.peer();
    Peer& peer = peers_[who.id];
    // The id of a removed peer is free for another worker, but not for the same incarnation.
    stale = peer.removed ? peer.identity.incarnation == who.incarnation
                         : !peer.identity.name.empty() && peer.identity.name != who.name;
    auto handshaking = Connection::State::kHandshaking;
    if (!stale) {
      if (!c->state.compare_exchange_strong(handshaking, Connection::State::kOpen)) return;  // lost meanwhile
      c->was_open = true;
      peer.removed = false;
      if (peer.was_lost) {
        peer.was_lost = false;
        WorkItem item;
        item.kind = WorkKind::kEvent;
        item.event = EventKind::kPeerBack;
        item.peer = who.id;
        item.incarnation = who.incarnation;
        queue_peer_event(std::move(item));
      }
      peer.identity = who;
      c->peer = who.id;
      c->limits = c->handshake.limits();
      c->link->set_limits(settings_.handshake.limits);
      if (c->initiator && !peer.last_error.empty() && c->link->describe() != peer.addresses.front()) {
        log("worker " + who.name + " is reached at " + c->link->describe() +
            ", because a faster transport failed: " + peer.last_error);
      }
      if (!peer.link && who.id != id()) {
        WorkItem item;
        item.kind = WorkKind::kEvent;
        item.event = EventKind::kConnected;
        item.peer = who.id;
        item.incarnation = who.incarnation;
        const std::string address = c->link->describe();
        const std::string from = c->source.empty() ? "" : ":" + c->source;
        item.text =
            who.name + (c->initiator ? " to " + address : " from " + address.substr(0, address.find(':')) + from);
        queue_peer_event(std::move(item));
      }
      if (!peer.link || c->initiator) {
        peer.link = c;
        peer.connecting = false;
        pending = std::exchange(peer.pending, {});
        std::erase_if(pending, [&](auto& w) {
          auto& m = w.message;
          const bool request = m->header.type == FrameType::kRequest;
          if (!reject_oversized(*c, request ? m->header.call_id : 0, *m, released)) {
            if (!request) return false;
            Call* call = calls_.find(m->header.call_id);
            if (call) call->connection = c->id;
            if (auto l = keep_alives_.find(m->header.call_id); l != keep_alives_.end()) l->second.connection = c->id;
            if (call || m->header.flags & kMustDeliver) return false;
          }
          if (m->pending_send) m->pending_send->done = true;
          expired.push_back(std::move(w));  // its caller has given up, or it is too large: the call is not made
          return true;
        });
      }
    }
  }
  {
    std::lock_guard lock(mutex_);
    notify_progress();
  }
  send_pending(c, pending);
  sending.unlock();
  if (stale) close_connection(c, "worker id " + std::to_string(c->handshake.peer().id) + " is taken by another name");
}

void Engine::arm_handshake_timer(Nanos at) {
  handshake_timer_at_ = std::min(handshake_timer_at_, at);
  arm_timer(at);
}

void Engine::expire_handshakes(Lock& lock, Nanos at) {
  std::vector<ConnectionPtr> expired;
  Released released;
  handshake_timer_at_ = kNever;
  for (auto& [token, c] : connections_) {
    if (c->state != Connection::State::kHandshaking) continue;
    if (c->handshake_deadline <= at) {
      c->timed_out = true;
      expired.push_back(c);
    } else {
      arm_handshake_timer(c->handshake_deadline);
    }
  }
  for (auto& [id, peer] : peers_) {
    expire_pending(peer, at, released);
    if (peer.retry_at <= at) {
      peer.retry_at = kNever;
      connect(lock, peer);
    } else if (peer.retry_at != kNever) {
      arm_handshake_timer(peer.retry_at);
    }
  }
  if (expired.empty() && released.empty()) return;
  lock.unlock();
  released.clear();
  for (auto& c : expired) close_connection(c, "the handshake took too long");
  lock.lock();
}

// ---- end of connections

void Engine::close_connection(const ConnectionPtr& c, std::string why) {
  Released released;
  std::deque<std::unique_ptr<Outgoing>> unsent;
  std::vector<ConnectionPtr> closed;
  {
    std::lock_guard lock(mutex_);
    if (connections_.erase(c->id) == 0) return;  // the first report of the end has the reason
  }
  mark_closed(*c);
  c->link->close();
  {
    std::lock_guard lock(c->send_mutex);
    unsent = std::exchange(c->queue, {});
  }
  {
    Lock lock(mutex_);
    const bool was_open = c->was_open;
    for (const int fd : {c->link->fd(), c->link->lanes_fd()}) epoll_ctl(links_epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    const bool may_be_there = c->timed_out || is_transient(why);
    const bool gone = why.empty() || why == std::generic_category().message(ECONNRESET);
    auto found = c->peer >= 0 || was_open ? peers_.find(c->peer) : peers_.end();
    const bool parted = c->goodbye && found != peers_.end() && found->second.removed;
    if (c->goodbye && !parted) why = "it shut down";
    if (why.empty()) {
      why =
          "the connection was closed without a goodbye: its process died or was killed, or it closed the connection "
          "and logged why";
    }
    if (!was_open) {
      if (!c->initiator) {
        // Do not log peers that connect and close at once: they may have been shut down.
        if (!stopping() && !gone) log_rejected(*c->link, c->source, why, c->displaced);
      } else if (c->lane_of) {
        if (!stopping() && c->lane_of->state == Connection::State::kOpen)
          log("no further lane to " + c->link->describe() + ": " + why);
      } else if (found != peers_.end()) {
        Peer& peer = found->second;
        peer.last_error = "cannot reach worker " + peer.identity.name + " at " + c->link->describe() + ": " + why;
        peer.slow = peer.slow || may_be_there;
        if (peer.connecting && !stopping()) {
          connect(lock, peer);
        } else {
          unreachable(peer, peer.last_error, released);
        }
      }
    } else {
      const auto status = stopping() ? CallStatus::kStopped : CallStatus::kPeerLost;
      calls_.for_each([&](std::uint64_t id, Call& call) {
        if (call.connection == c->id) complete(id, Completion{.status = status, .why = why}, released);
      });
      for (auto it = keep_alives_.begin(); it != keep_alives_.end();) {
        if (it->second.connection == c->id) {
          released.push_back(std::move(it->second.owner));
          it = keep_alives_.erase(it);
        } else {
          ++it;
        }
      }
      ConnectionPtr other;
      for (auto& [token, o] : connections_) {
        if (o->peer == c->peer && o->state == Connection::State::kOpen) other = o;
      }
      if (found != peers_.end()) {
        if (found->second.link == c) found->second.link = other;
        if (!other && !stopping() && !parted) {
          found->second.was_lost = true;
          if (c->goodbye) {  // do not reconnect to this peer; a new worker may get its id
            found->second.removed = true;
            found->second.last_error = why;
          }
          WorkItem item;
          item.kind = WorkKind::kEvent;
          item.event = c->goodbye ? EventKind::kPeerLeft : EventKind::kPeerLost;
          item.peer = c->peer;
          item.incarnation = c->handshake.peer().incarnation;
          item.text = why;
          queue_peer_event(std::move(item));
        }
      }
    }
    notify_progress();
    if (!has_leader_) {
      closed = reap_closed();
      watch_links();
    }
    interrupt_poll();
  }
}

/// Requires mutex_. Queues a line for the log of the layer above.
void Engine::log(std::string text) {
  WorkItem item;
  item.kind = WorkKind::kEvent;
  item.event = EventKind::kLog;
  item.text = std::move(text);
  push(std::move(item));
}

}  // namespace telegrad

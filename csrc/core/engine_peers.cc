// Peers: listening, connecting on first use, handshakes, and the end of connections.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr Nanos kRetry = 5 * kMillisecond;  // first pause before an address is tried again
constexpr Nanos kSlowestRetry = 500 * kMillisecond;

/// Transient errors: the worker may still be at the address, but the worker or the network is busy. All other errors,
/// above all a refused connection, mean that the worker is not there.
constexpr int kPassing[] = {EAGAIN,     EINTR,        ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ENETDOWN,
                            ECONNRESET, ECONNABORTED, EPIPE,     EMFILE,       ENFILE,      ENOBUFS,   ENOMEM};

bool passing(int error) { return std::find(std::begin(kPassing), std::end(kPassing), error) != std::end(kPassing); }

/// Returns whether the error text of a link is transient; so is a plain end of stream.
bool passing(const std::string& why) {
  return why.empty() || std::any_of(std::begin(kPassing), std::end(kPassing),
                                    [&](int error) { return why.ends_with(std::generic_category().message(error)); });
}

}  // namespace

void Engine::set_peer(PeerAddress address) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[address.identity.id];
  peer.identity = std::move(address.identity);
  peer.addresses = std::move(address.addresses);
  peer.next_address = 0;
  peer.forgotten = false;
}

void Engine::forget_peer(std::int32_t id, const std::string& why) {
  Kept kept;
  std::vector<ConnectionPtr> links;
  {
    std::lock_guard lock(mutex_);
    auto found = peers_.find(id);
    if (found == peers_.end()) return;
    found->second.forgotten = true;
    found->second.last_error = why;
    for (auto& [token, c] : connections_) {
      if (c->peer == id) links.push_back(c);
    }
    unreachable(found->second, why, kept);
  }
  for (auto& c : links) lost(c, why);
}

void Engine::part_from(std::int32_t id, const std::string& why) {
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
  forget_peer(id, why);
}

// ---- connecting

ConnectionPtr Engine::add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator) {
  const int fd = link->fd();
  link->set_limits(kStrangerLimits);
  auto c = std::make_shared<Connection>(next_token_++, std::move(link), std::move(handshake), initiator);
  c->handshake_deadline = now() + settings_.handshake_timeout;
  connections_.emplace(c->id, c);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = c->id}};
  epoll_ctl(inner_.get(), EPOLL_CTL_ADD, fd, &event);
  remind(c->handshake_deadline);
  return c;
}

/// Requires mutex_, and releases it while HELLO is sent. Tries the addresses of the peer, starting after the last one.
void Engine::connect(Lock& lock, Peer& peer) {
  const Nanos at = now();
  if (!peer.connecting) {
    peer.connecting = true;
    peer.slow = false;
    peer.next_address = 0;
    peer.retry_after = kRetry;
    peer.last_error = peer.addresses.empty() ? "its address is unknown" : "";
  }
  Kept kept;
  while (peer.next_address < peer.addresses.size()) {
    const std::string address = peer.addresses[peer.next_address++];
    Transport* transport = find_transport(address);
    if (!transport) {
      peer.last_error = "no transport for the address " + address;
      continue;
    }
    try {
      auto link = transport->connect(address);
      Handshake handshake = Handshake::initiate(settings_.credo, peer.identity);
      const Handshake::Step hello = handshake.begin();
      auto c = add_connection(std::move(link), std::move(handshake), true);
      c->peer = peer.identity.id;
      lock.unlock();
      transmit(c, frame(hello));  // the leader is notified of a failure
      lock.lock();
      if (!role_held_) watch();
      return;
    } catch (const std::system_error& e) {
      peer.last_error = e.what();
      peer.slow = peer.slow || passing(e.code().value());
    }
  }
  if (peer.slow) {
    peer.connecting = !peer.waiting.empty();
    if (!peer.connecting) return;
    peer.slow = false;
    peer.next_address = 0;
    peer.retry_at = at + peer.retry_after;
    peer.retry_after = std::min(2 * peer.retry_after, kSlowestRetry);
    return remind(peer.retry_at);
  }
  unreachable(peer, peer.last_error, kept);
  lock.unlock();
  kept.clear();
  lock.lock();
}

/// Requires mutex_. Fails all messages that wait for a connection, because the peer is unreachable or removed.
void Engine::unreachable(Peer& peer, const std::string& why, Kept& kept) {
  peer.connecting = false;
  peer.retry_at = kNever;
  auto waiting = std::exchange(peer.waiting, {});
  for (auto& w : waiting) drop(std::move(w), why, kept);
  if (!waiting.empty() && !peer.link && !peer.forgotten && !stopping()) {
    peer.was_lost = true;
    Item item;
    item.kind = ItemKind::kEvent;
    item.event = EventKind::kPeerLost;
    item.peer = peer.identity.id;
    item.incarnation = peer.identity.incarnation;
    item.text = why;
    tell(std::move(item));
  }
  ring_progress();
}

/// Requires mutex_. Drops a message that will not be sent.
void Engine::drop(Peer::Waiting&& waiting, const std::string& why, Kept& kept) {
  struct Message final : Keep {
    std::unique_ptr<Outgoing> m;
  };
  auto keep = std::make_unique<Message>();
  keep->m = std::move(waiting.message);
  if (keep->m->header.type == FrameType::kRequest) {
    settle(keep->m->header.call_id, Outcome{.status = CallStatus::kUnreachable, .why = why}, kept);
    stop_lingering(keep->m->header.call_id, kept);
  }
  if (keep->m->departure) keep->m->departure->gone = true;
  kept.push_back(std::move(keep));
}

/// Requires mutex_. Fails calls that have waited for a connection for connect_timeout. The peer may still be alive, so
/// messages that must be delivered stay queued.
void Engine::expire_waiting(Peer& peer, Nanos at, Kept& kept) {
  std::deque<Peer::Waiting> late;
  bool any = false;
  const std::string why = "no connection to worker " + peer.identity.name + " within connect_timeout: " +
                          (peer.last_error.empty() ? "it does not answer" : peer.last_error);
  std::erase_if(peer.waiting, [&](Peer::Waiting& w) {
    if (w.until > at) {
      remind(w.until);
      return false;
    }
    any = true;
    if (!(w.message->header.flags & kMayLinger)) {
      late.push_back(std::move(w));
      return true;
    }
    w.until = kNever;
    if (w.message->departure) w.message->departure->late = true;
    settle(w.message->header.call_id, Outcome{.status = CallStatus::kUnreachable, .why = why}, kept);
    return false;
  });
  if (!any) return;
  if (peer.waiting.empty() && std::exchange(peer.retry_at, kNever) != kNever) peer.connecting = false;
  for (auto& w : late) drop(std::move(w), why, kept);
  ring_progress();
}

// ---- the handshake

void Engine::on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body) {
  if (c->state != Connection::State::kHandshaking) return lost(c, "it repeated the handshake");
  if (c->initiator && !c->vetted) {  // accepted connections were checked on arrival
    if (const auto why = objection(user_of(*c->link))) return lost(c, *why);
    c->vetted = true;
  }
  Handshake::Step step;
  try {
    step = c->handshake.on_frame(type, body);
  } catch (const std::exception& e) {  // no random bytes
    return lost(c, e.what());
  }
  if (step.send) {
    if (transmit(c, frame(step)) == Sent::kBroken) return;
  }
  if (!step.failed.empty()) return lost(c, step.failed);
  if (step.open && c->handshake.for_lane()) return join_lane(c);
  if (step.open) opened(c);  // after the welcome, which must be the first frame on the link
}

void Engine::opened(const ConnectionPtr& c) {
  std::deque<Peer::Waiting> waiting, late;
  Kept kept;
  bool stale = false;
  std::unique_lock sending(c->send_mutex);  // waiting messages are sent before new ones
  {
    std::lock_guard lock(mutex_);
    const Identity& who = c->handshake.peer();
    Peer& peer = peers_[who.id];
    // The id of a removed peer is free for another worker, but not for the same incarnation.
    stale = peer.forgotten ? peer.identity.incarnation == who.incarnation
                           : !peer.identity.name.empty() && peer.identity.name != who.name;
    auto handshaking = Connection::State::kHandshaking;
    if (!stale) {
      if (!c->state.compare_exchange_strong(handshaking, Connection::State::kOpen)) return;  // lost meanwhile
      c->opened = true;
      peer.forgotten = false;
      if (peer.was_lost) {
        peer.was_lost = false;
        Item item;
        item.kind = ItemKind::kEvent;
        item.event = EventKind::kPeerBack;
        item.peer = who.id;
        item.incarnation = who.incarnation;
        tell(std::move(item));
      }
      peer.identity = who;
      c->peer = who.id;
      c->limits = c->handshake.limits();
      c->link->set_limits(settings_.credo.limits);
      if (c->initiator && !peer.last_error.empty() && c->link->describe() != peer.addresses.front()) {
        log("worker " + who.name + " is reached at " + c->link->describe() +
            ", because a faster transport failed: " + peer.last_error);
      }
      if (!peer.link && who.id != id()) {
        Item item;
        item.kind = ItemKind::kEvent;
        item.event = EventKind::kConnected;
        item.peer = who.id;
        item.incarnation = who.incarnation;
        const std::string address = c->link->describe();
        const std::string from = c->source.empty() ? "" : ":" + c->source;
        item.text =
            who.name + (c->initiator ? " to " + address : " from " + address.substr(0, address.find(':')) + from);
        tell(std::move(item));
      }
      if (!peer.link || c->initiator) {
        peer.link = c;
        peer.connecting = false;
        waiting = std::exchange(peer.waiting, {});
        std::erase_if(waiting, [&](auto& w) {
          auto& m = w.message;
          const bool request = m->header.type == FrameType::kRequest;
          if (!refused(*c, request ? m->header.call_id : 0, *m, kept)) {
            if (!request) return false;
            Call* call = calls_.find(m->header.call_id);
            if (call) call->connection = c->id;
            if (auto l = lingering_.find(m->header.call_id); l != lingering_.end()) l->second.connection = c->id;
            if (call || m->header.flags & kMayLinger) return false;
          }
          if (m->departure) m->departure->gone = true;
          late.push_back(std::move(w));  // its caller has given up, or it is too large: the call is not made
          return true;
        });
      }
    }
  }
  {
    std::lock_guard lock(mutex_);
    ring_progress();
  }
  depart(c, waiting);
  sending.unlock();
  if (stale) lost(c, "worker id " + std::to_string(c->handshake.peer().id) + " is taken by another name");
}

void Engine::remind(Nanos at) {
  handshakes_at_ = std::min(handshakes_at_, at);
  arm_timer(at);
}

void Engine::expire_handshakes(Lock& lock, Nanos at) {
  std::vector<ConnectionPtr> late;
  Kept kept;
  handshakes_at_ = kNever;
  for (auto& [token, c] : connections_) {
    if (c->state != Connection::State::kHandshaking) continue;
    if (c->handshake_deadline <= at) {
      c->late = true;
      late.push_back(c);
    } else {
      remind(c->handshake_deadline);
    }
  }
  for (auto& [id, peer] : peers_) {
    expire_waiting(peer, at, kept);
    if (peer.retry_at <= at) {
      peer.retry_at = kNever;
      connect(lock, peer);
    } else if (peer.retry_at != kNever) {
      remind(peer.retry_at);
    }
  }
  if (late.empty() && kept.empty()) return;
  lock.unlock();
  kept.clear();
  for (auto& c : late) lost(c, "the handshake took too long");
  lock.lock();
}

// ---- end of connections

void Engine::lost(const ConnectionPtr& c, std::string why) {
  Kept kept;
  std::deque<std::unique_ptr<Outgoing>> unsent;
  std::vector<ConnectionPtr> dead;
  {
    std::lock_guard lock(mutex_);
    if (connections_.erase(c->id) == 0) return;  // the first report of the end has the reason
  }
  bury(*c);
  c->link->close();
  {
    std::lock_guard lock(c->send_mutex);
    unsent = std::exchange(c->queue, {});
  }
  {
    Lock lock(mutex_);
    const bool was_open = c->opened;
    for (const int fd : {c->link->fd(), c->link->lanes_fd()}) epoll_ctl(inner_.get(), EPOLL_CTL_DEL, fd, nullptr);
    const bool may_be_there = c->late || passing(why);
    const bool gone = why.empty() || why == std::generic_category().message(ECONNRESET);
    auto found = c->peer >= 0 || was_open ? peers_.find(c->peer) : peers_.end();
    const bool parted = c->goodbye && found != peers_.end() && found->second.forgotten;
    if (c->goodbye && !parted) why = "it shut down";
    if (why.empty()) {
      why =
          "the connection was closed without a goodbye: its process died or was killed, or it closed the connection "
          "and logged why";
    }
    if (!was_open) {
      if (!c->initiator) {
        // Do not log peers that connect and close at once: they may have been shut down.
        if (!stopping() && !gone) log_refusal(*c->link, c->source, why, c->displaced);
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
          unreachable(peer, peer.last_error, kept);
        }
      }
    } else {
      const auto status = stopping() ? CallStatus::kStopped : CallStatus::kPeerLost;
      calls_.for_each([&](std::uint64_t id, Call& call) {
        if (call.connection == c->id) settle(id, Outcome{.status = status, .why = why}, kept);
      });
      for (auto it = lingering_.begin(); it != lingering_.end();) {
        if (it->second.connection == c->id) {
          kept.push_back(std::move(it->second.keep));
          it = lingering_.erase(it);
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
            found->second.forgotten = true;
            found->second.last_error = why;
          }
          Item item;
          item.kind = ItemKind::kEvent;
          item.event = c->goodbye ? EventKind::kPeerLeft : EventKind::kPeerLost;
          item.peer = c->peer;
          item.incarnation = c->handshake.peer().incarnation;
          item.text = why;
          tell(std::move(item));
        }
      }
    }
    ring_progress();
    if (!role_held_) {
      dead = forget_dead();
      watch();
    }
    kick();
  }
}

/// Requires mutex_. Queues a line for the log of the layer above.
void Engine::log(std::string text) {
  Item item;
  item.kind = ItemKind::kEvent;
  item.event = EventKind::kLog;
  item.text = std::move(text);
  push(std::move(item));
}

}  // namespace telegrad

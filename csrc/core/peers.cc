#include "core/peers.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/engine_parts.h"
#include "core/tuning.h"

namespace telegrad {

Peer* Peers::find(std::int32_t id) {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : &found->second;
}

std::shared_ptr<Listener> Peers::find_listener(std::uint64_t token) const {
  const auto found = listeners_.find(token);
  return found == listeners_.end() ? nullptr : found->second;
}

bool Peers::has_pending() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& p) { return p.second.connecting && !p.second.pending.empty(); });
}

void Peers::stop(const std::string& why, Released& released) {
  for (auto& [id, peer] : peers_) unreachable(peer, why, released);
}

void Peers::abandon_in_child() {
  for (auto& [token, c] : connections_) {
    for (const int fd : c->link->descriptors()) ::close(fd);
  }
  for (auto& [token, l] : listeners_) ::close(l->fd());
  for (const int fd : accepting_ ? accepting_->descriptors() : std::vector<int>()) ::close(fd);
  users_.close();
  struct Abandoned {  // never destroyed
    decltype(connections_) connections;
    decltype(listeners_) listeners;
    decltype(accepting_) accepting;
    decltype(peers_) peers;
  };
  new Abandoned{std::move(connections_), std::move(listeners_), std::move(accepting_), std::move(peers_)};
  connections_.clear();
  listeners_.clear();
  peers_.clear();
}

void Peers::set_peer(PeerAddress address) {
  std::vector<ConnectionPtr> older;
  {
    Lock lock(parts_.mutex);
    Peer& peer = add_peer(address.identity.id);
    const std::uint64_t incarnation = address.identity.incarnation;
    if (incarnation != 0 && incarnation < peer.agreement.incarnation()) return;  // news that are out of date
    peer.newest = std::max(peer.newest, incarnation);
    if (peer.agreement.incarnation() != 0 && incarnation > peer.agreement.incarnation()) {
      for (auto& [token, c] : connections_) {
        if (c->peer == address.identity.id) older.push_back(c);
      }
      if (peer.dial) peer.dial->superseded = true;
      if (peer.connection_to_open) older.push_back(peer.connection_to_open);
    }
  }
  for (const auto& c : older) close_connection(c, replaced_by(address.identity));
  Lock lock(parts_.mutex);
  Peer& peer = add_peer(address.identity.id);
  peer.agreement.meet(address.identity.incarnation);
  peer.identity = std::move(address.identity);
  peer.addresses = std::move(address.addresses);
  peer.next_address = 0;
  mark_present(peer);
  retry(lock, peer);  // the dial was to the older one
}

void Peers::remove_peer(std::int32_t id, const std::string& why, std::uint64_t incarnation) {
  std::vector<ConnectionPtr> links;
  {
    Released released;
    Lock lock(parts_.mutex);
    Peer* const peer = find(id);
    if (!peer || peer->identity.incarnation > incarnation) return;
    mark_removed(id, *peer);
    // Those with which no session has begun yet are removed with it.
    peer->identity.incarnation = std::max(peer->identity.incarnation, std::min(peer->newest, incarnation));
    peer->last_error = why;
    for (auto& [token, c] : connections_) {
      if (c->peer == id) links.push_back(c);
    }
    const ConnectionPtr& opening = peer->connection_to_open;
    if (opening && opening->handshake.peer().incarnation <= incarnation) links.push_back(opening);
    unreachable(*peer, why, released);
  }
  for (auto& c : links) close_connection(c, why);
}

void Peers::disconnect(std::int32_t id, const std::string& why, std::uint64_t incarnation) {
  std::vector<ConnectionPtr> open;
  {
    Lock lock(parts_.mutex);
    const Peer* const peer = find(id);
    if (!peer || peer->identity.incarnation > incarnation) return;
    for (auto& [token, c] : connections_) {
      if (c->peer == id && c->state == Connection::State::kOpen) open.push_back(c);
    }
  }
  for (auto& c : open) {
    c->goodbye = true;
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kGoodbye;
    parts_.sender.transmit(c, std::move(m));  // if it cannot be sent at once, the peer sees a lost connection
  }
  remove_peer(id, why, incarnation);
}

// ---- connecting

void Peers::connect(Lock& lock, Peer& peer) {
  const Nanos at = now();
  if (peer.dial || peer.connection || peer.connection_to_open) return;
  if (!peer.connecting) {
    peer.connecting = true;
    peer.may_recover = false;
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
    ConnectionPtr c;
    std::unique_ptr<Outgoing> hello;
    try {
      auto link = transport->connect(address, parts_.settings.security);
      const bool to_self = peer.identity.id == parts_.settings.handshake.me.id;
      Handshake handshake = Handshake::initiate(parts_.settings.handshake, peer.identity,
                                                to_self ? SessionOffer{} : peer.agreement.dial());
      hello = frame(handshake.begin());
      c = add_connection(std::move(link), std::move(handshake), true);
      c->peer = peer.identity.id;
      c->link->set_peer_name(peer.identity.name);
    } catch (const std::exception& e) {
      const auto* system = dynamic_cast<const std::system_error*>(&e);
      peer.agreement.give_up();
      peer.last_error = {e.what(), system ? system->code().value() : ENOMEM};  // no random bytes, TLS without memory
      peer.may_recover = peer.may_recover || peer.last_error.is_transient();
      continue;
    }
    peer.dial = c;
    ++peer.held;
    {
      Unlock unlocked(lock);
      parts_.sender.transmit(c, std::move(hello));  // the leader is notified of a failure
    }
    --peer.held;
    if (!parts_.leader.exists()) parts_.leader.watch_links();
    return;
  }
  if (peer.may_recover) {
    peer.connecting = !peer.pending.empty() || peer.announced;
    if (!peer.connecting) return;
    peer.may_recover = false;
    peer.next_address = 0;
    peer.retry_at = at + peer.retry_after;
    peer.retry_after = std::min(2 * peer.retry_after, kMaxRetryDelay);
    return arm_timer(peer.retry_at);
  }
  unreachable(peer, peer.last_error, released);
  ++peer.held;
  {
    Unlock unlocked(lock);
    released.clear();
  }
  --peer.held;
}

/// Fails all messages that wait for a connection, because the peer is unreachable or removed.
void Peers::unreachable(Peer& peer, const LinkError& why, Released& released) {
  peer.connecting = false;
  peer.retry_at = kNever;
  auto pending = peer.pending.take();
  for (auto& w : pending) fail_pending(std::move(w), why, released);
  const bool announced = std::exchange(peer.announced, false);
  if ((announced || !pending.empty()) && !peer.connection && !peer.removed && !parts_.is_stopping()) {
    peer.was_lost = true;
    push_session_event(EventKind::kPeerLost, peer, peer.identity, why.text);
  }
  parts_.leader.notify_progress();
}

void Peers::give_up(Peer& peer, const LinkError& why, Released& released) {
  peer.last_error = why;
  unreachable(peer, why, released);
  parts_.queue.wake_for_work();
}

std::size_t Peers::most_pending() const {
  std::size_t most = 0;
  for (const auto& [id, peer] : peers_) most = std::max(most, peer.pending.size());
  return most;
}

std::int64_t Peers::most_pending_bytes() const {
  std::int64_t most = 0;
  for (const auto& [id, peer] : peers_) most = std::max(most, peer.pending.kept_bytes());
  return most;
}

std::int64_t Peers::most_pending_requests() const {
  std::int64_t most = 0;
  for (const auto& [id, peer] : peers_) most = std::max(most, peer.pending.request_bytes());
  return most;
}

/// Drops a message that will not be sent.
void Peers::fail_pending(PendingMessage&& pending, const LinkError& why, Released& released) {
  struct Message final : KeepAlive {
    std::unique_ptr<Outgoing> m;
  };
  auto owner = std::make_unique<Message>();
  owner->m = std::move(pending.message);
  if (owner->m->header.type == FrameType::kRequest) {
    parts_.calls.complete(owner->m->header.call_id, Completion::lost(CallStatus::kUnreachable, why), released);
    parts_.calls.release_keep_alive(owner->m->header.call_id, released);
  }
  if (owner->m->pending_send) owner->m->pending_send->done = true;
  released.push_back(std::move(owner));
}

/// Fails calls that have waited for a connection for connect_timeout. The peer may still be alive, so messages that
/// must be delivered stay queued, until the peer has been silent for as long as the failure detector allows.
void Peers::expire_pending(Peer& peer, Nanos at, Released& released) {
  bool any = false, lost = false;
  const std::string address = peer.dial ? " at " + peer.dial->link->describe() : "";
  const bool silent = peer.last_error.text.empty();
  const LinkError why = (silent ? LinkError("it does not answer" + address) : peer.last_error)
                            .with_context("no connection to worker " + peer.identity.name + " within connect_timeout");
  auto expired = peer.pending.take_if([&](PendingMessage& w) REQUIRES(engine_mutex) {
    if (w.until > at) {
      arm_timer(w.until);
      return false;
    }
    any = true;
    if (!w.expired && !(w.message->header.flags & kMustDeliver)) return true;
    if (std::exchange(w.expired, true)) {
      lost = true;
      return false;
    }
    w.until = parts_.detector.time_of_loss(at - parts_.settings.connect_timeout, at);
    arm_timer(w.until);
    if (w.message->pending_send) w.message->pending_send->expired = true;
    parts_.calls.complete(w.message->header.call_id, Completion::lost(CallStatus::kUnreachable, why), released);
    return false;
  });
  if (!any) return;
  if (peer.pending.empty() && std::exchange(peer.retry_at, kNever) != kNever) peer.connecting = false;
  for (auto& w : expired) fail_pending(std::move(w), why, released);
  if (lost) return unreachable(peer, why, released);
  parts_.leader.notify_progress();
}

// ---- time

void Peers::arm_timer(Nanos at) {
  timer_at_ = std::min(timer_at_, at);
  parts_.timer.arm(at);
}

void Peers::on_timer(Lock& lock, Nanos at) {
  if (at >= timer_at_) run_timer(lock, at);
  parts_.timer.arm(timer_at_);
}

void Peers::run_timer(Lock& lock, Nanos at) {
  std::vector<ConnectionPtr> expired, attempts, unverified;
  Released released;
  timer_at_ = kNever;
  resume_listening(at);
  for (auto& [token, c] : connections_) {
    if (c->attempt_at <= at) {
      c->attempt_at = kNever;
      attempts.push_back(c);
    } else if (c->attempt_at != kNever) {
      arm_timer(c->attempt_at);
    }
    if (c->verify_until <= at) {
      c->verify_until = kNever;
      unverified.push_back(c);
    } else if (c->verify_until != kNever) {
      arm_timer(c->verify_until);
    }
    if (c->state != Connection::State::kHandshaking) continue;
    if (c->handshake_deadline <= at) {
      c->timed_out = true;
      expired.push_back(c);
    } else {
      arm_timer(c->handshake_deadline);
    }
  }
  for (auto& [id, peer] : peers_) {
    expire_pending(peer, at, released);
    if (peer.retry_at <= at) {
      peer.retry_at = kNever;
      connect(lock, peer);
    } else if (peer.retry_at != kNever) {
      arm_timer(peer.retry_at);
    }
  }
  if (expired.empty() && attempts.empty() && unverified.empty() && released.empty()) return;
  Unlock unlocked(lock);
  released.clear();
  for (auto& c : unverified) give_up_verifying(c);
  for (auto& c : attempts) attempt(c);
  for (auto& c : expired) close_connection(c, "the handshake took too long");
}

}  // namespace telegrad

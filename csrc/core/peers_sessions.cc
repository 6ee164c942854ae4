// Sessions of the peers: which connection opens, when, and what its end tells.
#include <algorithm>
#include <utility>

#include "core/engine_parts.h"
#include "core/peers.h"

namespace telegrad {

Peer& Peers::add_peer(std::int32_t id) {
  if (!find(id)) forget_removed();
  return peers_.try_emplace(id, parts_.settings.handshake.me.id < id).first->second;
}

/// Records that a peer is no member, so it does not count as a peer. What is known of it stays for a while: it rejects
/// the messages and connections of its process.
void Peers::mark_removed(std::int32_t id, Peer& peer) {
  if (std::exchange(peer.removed, true)) return;
  peer.removal = ++removals_;
  removed_.emplace(peer.removal, id);
}

void Peers::mark_present(Peer& peer) {
  if (std::exchange(peer.removed, false)) removed_.erase(peer.removal);
}

/// Forgets those that were removed first, if more are removed than there may be peers.
void Peers::forget_removed() {
  for (auto each = removed_.begin(); each != removed_.end() && removed_.size() > parts_.settings.load.peers;) {
    const Peer& peer = peers_.at(each->second);
    const bool used = peer.held > 0 || peer.connection || peer.dial || peer.connection_to_open || peer.connecting ||
                      peer.unacknowledged > 0 || !peer.proven.empty() || !peer.pending.empty();
    if (used) {
      ++each;
      continue;
    }
    peers_.erase(each->second);
    each = removed_.erase(each);
    has_forgotten_ = true;
  }
}

/// Returns whether the connection takes part in the agreement: lanes and connections of a worker to itself do not.
bool Peers::has_session(const Connection& c) const {
  return !c.handshake.for_lane() && c.handshake.peer().id != parts_.settings.handshake.me.id;
}

// ---- events

void Peers::push_event(EventKind kind, const Identity& peer, std::string text) {
  WorkItem item;
  item.kind = WorkKind::kEvent;
  item.event = kind;
  item.peer = peer.id;
  item.incarnation = peer.incarnation;
  item.text = std::move(text);
  parts_.queue.push_peer_event(std::move(item));
}

void Peers::push_session_event(EventKind kind, Peer& peer, const Identity& identity, std::string text) {
  ++peer.unacknowledged;
  push_event(kind, identity, std::move(text));
}

void Peers::acknowledge(std::int32_t id) {
  Lock lock(parts_.mutex);
  Peer* const peer = find(id);
  if (!peer || peer->unacknowledged == 0 || --peer->unacknowledged > 0 || peer->proven.empty()) return;
  std::move(peer->proven.begin(), peer->proven.end(), std::back_inserter(resumable_));
  peer->proven.clear();
  has_resumable_.store(true, std::memory_order_relaxed);
  if (!parts_.leader.exists()) parts_.leader.watch_links();
  parts_.leader.interrupt_poll();
}

void Peers::set_epoch(std::int32_t id, std::int64_t epoch) {
  Lock lock(parts_.mutex);
  const bool known = find(id) != nullptr;
  Peer& peer = add_peer(id);
  peer.epoch = epoch;
  if (known) return;
  peer.last_error = "no such worker";
  mark_removed(id, peer);  // until it is a peer
}

std::int64_t Peers::epoch_of(std::int32_t id) const {
  Lock lock(parts_.mutex);
  const auto found = peers_.find(id);
  return found == peers_.end() ? 0 : found->second.epoch;
}

bool Peers::is_open(std::uint64_t connection) const {
  Lock lock(parts_.mutex);
  return has_connection(connection);
}

// ---- the beginning

void Peers::resume_handshakes() {
  std::vector<ConnectionPtr> proven;
  {
    Lock lock(parts_.mutex);
    proven.swap(resumable_);
    has_resumable_.store(false, std::memory_order_relaxed);
  }
  for (const ConnectionPtr& c : proven) on_proven(c);
}

/// Continues a handshake in which the peer has proven its identity.
void Peers::on_proven(const ConnectionPtr& c) {
  if (c->handshake.purpose() == Purpose::kResume) return on_resume_proven(c);
  std::optional<Handshake::Step> step;
  for (bool again = true; again;) {
    std::vector<ConnectionPtr> ended;
    {
      Lock lock(parts_.mutex);
      if (!has_connection(c->id)) {  // closed meanwhile
        if (Peer* peer = find(c->handshake.peer().id)) retry(lock, *peer);
        return;
      }
      step = decide(c, ended);
    }
    again = !ended.empty();
    const Identity& remote = c->handshake.peer();
    for (const ConnectionPtr& old : ended) {
      const bool replaced = old->handshake.peer().incarnation < remote.incarnation;
      close_connection(old, replaced ? replaced_by(remote) : "its worker has connected again");
    }
  }
  if (step) take_step(c, *step);
}

/// Decides how a handshake goes on; null: later, after an event. Connections in `ended` must be closed before.
std::optional<Handshake::Step> Peers::decide(const ConnectionPtr& c, std::vector<ConnectionPtr>& ended) {
  Handshake& handshake = c->handshake;
  const Identity& remote = handshake.peer();
  if (!has_session(*c)) return handshake.proceed();
  const Peer* const known = find(remote.id);
  if (const std::string why = known && !known->removed ? "" : parts_.overload.peer_reason(); !why.empty())
    return handshake.refuse(OfferAnswer::kForeign, why);
  Peer& peer = add_peer(remote.id);
  if (!known) peer.was_lost = has_forgotten_;  // it may be one of those
  // The id of a removed peer is free for another worker, but not for the same incarnation.
  const bool taken = peer.removed ? peer.identity.incarnation == remote.incarnation
                                  : !peer.identity.name.empty() && peer.identity.name != remote.name;
  if (taken) {
    const std::string id = "worker id " + std::to_string(remote.id);
    const std::string why = peer.removed ? id + " is no member any more" : id + " is taken by another name";
    return handshake.refuse(OfferAnswer::kForeign, why);
  }
  // Before the peer counts as back. `newest` may be ahead of the agreement: see `set_peer`.
  if (!c->initiator) {
    if (auto step = refuse_older(handshake, peer)) return step;
  } else if (remote.incarnation < peer.newest) {
    return Handshake::Step{.failed = "an older process of worker " + remote.name + " answers at this address",
                           .code = kOlderCode};
  }
  peer.newest = std::max(peer.newest, remote.incarnation);
  if (std::exchange(peer.was_lost, false)) {
    peer.announced = true;
    push_session_event(EventKind::kPeerBack, peer, remote);
  }
  if (peer.unacknowledged > 0) {
    peer.proven.push_back(c);
    return std::nullopt;
  }
  SessionAgreement& agreement = peer.agreement;
  if (c->initiator) {
    agreement.confirm(remote.incarnation);
    return handshake.proceed();
  }
  const OfferVerdict verdict = agreement.judge(remote.incarnation, handshake.offer());
  if (verdict.ends_session) ended.push_back(peer.connection ? peer.connection : peer.connection_to_open);
  if (verdict.ends_dial) {
    peer.dial->superseded = true;
    ended.push_back(peer.dial);
  }
  if (!ended.empty()) return std::nullopt;
  switch (verdict.answer) {
    case OfferAnswer::kAccept:
      break;
    case OfferAnswer::kStale:
    case OfferAnswer::kBusy:
    case OfferAnswer::kOutdated:
    case OfferAnswer::kForeign:
    case OfferAnswer::kEnded:
      c->superseded = true;
      return handshake.refuse(verdict.answer, "another connection of these workers is open or about to open");
  }
  agreement.accept(remote.incarnation, handshake.offer());
  peer.connection_to_open = c;
  return handshake.proceed();
}

/// Returns why the sessions of an older process end.
std::string Peers::replaced_by(const Identity& newer) {
  return std::string(wire::LossText::kReplaced) + " " + newer.name;
}

/// Refuses a process if a newer one has its name; null if it is the newest known.
std::optional<Handshake::Step> Peers::refuse_older(Handshake& handshake, const Peer& peer) {
  const Identity& remote = handshake.peer();
  if (remote.incarnation >= std::max(peer.newest, peer.agreement.incarnation())) return std::nullopt;
  return handshake.refuse(OfferAnswer::kStale, "another worker has taken the name " + remote.name);
}

/// Makes an open connection the session of its peer. Returns false if it has been given up, or its process removed
/// meanwhile: another thread closes it.
bool Peers::begin_session(const ConnectionPtr& c, Peer& peer) {
  if (peer.removed && c->handshake.peer().incarnation <= peer.identity.incarnation) return false;
  if (c->initiator) {
    if (peer.dial != c) return false;
    peer.dial.reset();
    peer.agreement.open_dial();
  } else {
    if (peer.connection_to_open != c) return false;
    peer.connection_to_open.reset();
  }
  peer.identity = c->handshake.peer();
  mark_present(peer);
  peer.connection = c;
  peer.announced = false;
  peer.connecting = false;
  peer.retry_at = kNever;
  return true;
}

/// Records that an accepted connection has closed before it was open at this end.
void Peers::stop_opening(Lock& lock, const ConnectionPtr& c) {
  for (auto& [id, peer] : peers_) {
    if (peer.connection_to_open != c) continue;
    peer.connection_to_open.reset();
    peer.agreement.end();
    if (peer.identity.name.empty() && !peer.removed) mark_removed(id, peer);  // only its handshake has made it a peer
    return retry(lock, peer);
  }
}

/// Dials for the messages that wait, or because the peer has been announced, if no other attempt is under way.
void Peers::retry(Lock& lock, Peer& peer) {
  const bool needed = peer.connecting || (peer.announced && !peer.removed);
  if (needed && !peer.dial && peer.retry_at == kNever && !parts_.is_stopping()) connect(lock, peer);
}

// ---- the end

/// Records the end of the session. `parted`: this worker has ended it.
void Peers::end_session(const ConnectionPtr& c, Peer& peer, const std::string& why, bool parted) {
  peer.agreement.end();
  peer.connection.reset();
  if (parts_.is_stopping() || parted) return;
  peer.was_lost = true;
  if (c->goodbye) {  // do not reconnect to this peer; a new worker may get its id
    mark_removed(c->peer, peer);
    peer.last_error = why;
  }
  push_session_event(c->goodbye ? EventKind::kPeerLeft : EventKind::kPeerLost, peer, c->handshake.peer(), why);
}

}  // namespace telegrad

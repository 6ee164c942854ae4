// The end of connections, by what each was for: a session, an attempt to continue one, a lane, or a connection that was
// being made.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/engine_parts.h"
#include "core/peers.h"

namespace telegrad {
namespace {

using Entries = std::deque<SendQueue::Entry>;

/// Takes the messages that have not been sent; destroy them without a lock.
std::pair<Entries, Entries> take_unsent(Connection& c) {
  MutexLock lock(c.send_mutex);
  c.queued_large = 0;
  c.order = {};
  return {std::exchange(c.queue.entries, {}), std::exchange(c.overtaking.entries, {})};
}

/// Returns why a connection has ended, for the layer above and the log. `parted`: this worker has ended the session.
LinkError end_reason(const Connection& c, const LinkError& why, bool parted) {
  LinkError reason = c.goodbye && !parted ? LinkError("it shut down") : why;
  if (reason.text.empty()) {
    reason.text =
        "the connection was closed without a goodbye: its process died or was killed, or it closed the connection and "
        "logged why";
  }
  return reason;
}

}  // namespace

void Peers::on_goodbye(const Connection& c) {
  Lock lock(parts_.mutex);
  for (auto& [token, other] : connections_) {
    const bool same = other->handshake.peer().incarnation == c.handshake.peer().incarnation;
    if (other->peer == c.peer && same) other->goodbye = true;
  }
}

void Peers::close_connection(const ConnectionPtr& c, LinkError why) {
  Released released;
  std::vector<ConnectionPtr> closed;
  ConnectionPtr next;  // attempt to continue the session
  {
    Lock lock(parts_.mutex);
    if (connections_.erase(c->id) == 0) return;  // the first report of the end has the reason
    next = std::move(c->next_link);
  }
  parts_.leader.mark_closed(*c);
  c->link->close();
  const auto unsent = take_unsent(*c);
  LinkError reason;
  {
    Lock lock(parts_.mutex);
    for (const int fd : {c->link->fd(), c->link->lanes_fd()}) parts_.leader.remove_fd(fd);
    Peer* const peer = c->peer >= 0 || c->was_open ? find(c->peer) : nullptr;
    const bool parted = c->goodbye && peer && peer->removed;
    reason = end_reason(*c, why, parted);
    // Whatever the connection was for: the peer knows a newer process of this worker's name.
    if (c->initiator && c->answer == OfferAnswer::kStale)
      push_event(EventKind::kReplaced, c->handshake.peer(), reason.text);
    if (c->was_open) {
      on_open_closed(c, peer, reason, parted, released);
    } else if (!c->initiator) {
      on_accepted_closed(lock, c, why, reason.text);
    } else if (c->continues) {
      if (c->continues->next_link == c) c->continues->next_link.reset();
    } else if (c->lane_of) {
      on_lane_closed(*c, reason.text);
    } else if (peer) {
      on_dial_failed(lock, c, *peer, reason, c->timed_out || why.is_transient(), released);
    }
    parts_.leader.notify_progress();
    if (!parts_.leader.exists()) {
      closed = parts_.leader.reap_closed();
      parts_.leader.watch_links();
    }
    parts_.leader.interrupt_poll();
  }
  if (next) close_connection(next, LinkError());
  if (c->continues && c->initiator) on_next_link_failed(c, reason);
}

/// Fails the calls of an open connection, and ends its session if it has one.
void Peers::on_open_closed(const ConnectionPtr& c, Peer* peer, const LinkError& why, bool parted, Released& released) {
  const auto status = parts_.is_stopping() ? CallStatus::kStopped : CallStatus::kPeerLost;
  parts_.calls.fail_calls_of(c->id, status, why, released);
  parts_.canceler.cancel_requests_of(c->id);
  parts_.queue.release(c->id);
  if (!peer || peer->connection != c) return;
  if (has_session(*c)) {
    end_session(c, *peer, why.text, parted);
  } else {
    peer->connection.reset();
  }
}

/// Records that an accepted connection did not open, and logs `text`. But not for peers that connect and close at once:
/// they may have been shut down.
void Peers::on_accepted_closed(Lock& lock, const ConnectionPtr& c, const LinkError& why, const std::string& text) {
  stop_opening(lock, c);
  const bool gone = why.code == 0 || why.code == ECONNRESET;
  if (!parts_.is_stopping() && !gone && !c->superseded) log_rejected(*c->link, c->source, text, c->displaced);
}

void Peers::on_lane_closed(const Connection& lane, const std::string& why) {
  if (!parts_.is_stopping() && lane.lane_of->state == Connection::State::kOpen)
    parts_.queue.log("no further lane to " + lane.link->describe() + ": " + why);
}

/// Records that a connection which this end has initiated did not open, and tries the next address.
void Peers::on_dial_failed(Lock& lock, const ConnectionPtr& c, Peer& peer, const LinkError& why, bool may_be_there,
                           Released& released) {
  if (peer.dial == c) {
    peer.dial.reset();
    peer.agreement.give_up();
  }
  if (c->superseded) return;
  peer.last_error = why.with_context("cannot reach worker " + peer.identity.name + " at " + c->link->describe());
  peer.may_recover = peer.may_recover || may_be_there;
  const OfferAnswer answer = c->answer;
  if (answer == OfferAnswer::kBusy || answer == OfferAnswer::kOutdated) {
    peer.may_recover = true;  // the peer connects
    peer.next_address = peer.addresses.size();
  }
  if (peer.connecting && !parts_.is_stopping()) {
    connect(lock, peer);
  } else {
    unreachable(peer, peer.last_error, released);
  }
}

}  // namespace telegrad

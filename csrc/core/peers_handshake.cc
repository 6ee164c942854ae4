// New connections and their handshakes.
#include <utility>

#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/peers.h"

namespace telegrad {

ConnectionPtr Peers::add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator) {
  link->set_limits(kHandshakeLimits);
  auto c = std::make_shared<Connection>(next_token_++, std::move(link), std::move(handshake), initiator);
  c->handshake_deadline = now() + parts_.settings.handshake_timeout;
  connections_.emplace(c->id, c);
  parts_.leader.add_fd(c->link->fd(), c->id);
  arm_timer(c->handshake_deadline);
  return c;
}

std::unique_ptr<Outgoing> Peers::frame(const Handshake::Step& step) {
  auto m = std::make_unique<Outgoing>();
  m->header.type = *step.send;
  struct Text final : KeepAlive {
    std::string text;
  };
  auto owner = std::make_unique<Text>();
  owner->text = step.body;
  m->body = owner->text;
  m->owner = std::move(owner);
  return m;
}

void Peers::on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body) {
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
    if (parts_.sender.transmit(c, frame(step)) == SendResult::kBroken) return;
  }
  if (!step.failed.empty()) return close_connection(c, step.failed);
  if (step.open && c->handshake.for_lane()) return attach_lane(c);
  if (step.open) on_open(c);  // after the welcome, which must be the first frame on the link
}

void Peers::on_open(const ConnectionPtr& c) {
  std::deque<PendingMessage> pending, expired;
  Released released;
  bool stale = false;
  std::unique_lock sending(c->send_mutex);  // waiting messages are sent before new ones
  {
    Lock lock(parts_.mutex);
    const Identity& remote = c->handshake.peer();
    Peer& peer = peers_[remote.id];
    // The id of a removed peer is free for another worker, but not for the same incarnation.
    stale = peer.removed ? peer.identity.incarnation == remote.incarnation
                         : !peer.identity.name.empty() && peer.identity.name != remote.name;
    auto handshaking = Connection::State::kHandshaking;
    if (!stale) {
      if (!c->state.compare_exchange_strong(handshaking, Connection::State::kOpen)) return;  // lost meanwhile
      c->was_open = true;
      peer.removed = false;
      if (peer.was_lost) {
        peer.was_lost = false;
        push_event(EventKind::kPeerBack, remote);
      }
      peer.identity = remote;
      c->peer = remote.id;
      c->limits = c->handshake.limits();
      c->link->set_limits(parts_.settings.handshake.limits);
      if (c->initiator && !peer.last_error.empty() && c->link->describe() != peer.addresses.front()) {
        parts_.queue.log("worker " + remote.name + " is reached at " + c->link->describe() +
                         ", because a faster transport failed: " + peer.last_error);
      }
      if (!peer.connection && remote.id != parts_.settings.handshake.me.id) {
        const std::string address = c->link->describe();
        const std::string from = c->source.empty() ? "" : ":" + c->source;
        push_event(
            EventKind::kConnected, remote,
            remote.name + (c->initiator ? " to " + address : " from " + address.substr(0, address.find(':')) + from));
      }
      if (!peer.connection || c->initiator) {
        peer.connection = c;
        peer.connecting = false;
        pending = std::exchange(peer.pending, {});
        std::erase_if(pending, [&](PendingMessage& w) REQUIRES(engine_mutex) {
          auto& m = w.message;
          const bool request = m->header.type == FrameType::kRequest;
          if (!parts_.sender.reject_oversized(*c, request ? m->header.call_id : 0, *m, released)) {
            if (!request) return false;
            parts_.calls.set_connection(m->header.call_id, c->id);
            const Call* call = parts_.calls.find(m->header.call_id);
            if (call && call->status == CallStatus::kPending) return false;
            if (m->header.flags & kMustDeliver) {  // the callee counts on it, but may not need to run it
              if (may_leave_out(m->header)) leave_out(*m, LeftOut::kCanceled, "");
              return false;
            }
          }
          if (m->pending_send) m->pending_send->done = true;
          expired.push_back(std::move(w));  // its caller has given up, or it is too large: the call is not made
          return true;
        });
      }
    }
  }
  {
    Lock lock(parts_.mutex);
    parts_.leader.notify_progress();
  }
  parts_.sender.send_pending(c, pending);
  sending.unlock();
  if (stale) close_connection(c, "worker id " + std::to_string(c->handshake.peer().id) + " is taken by another name");
}

}  // namespace telegrad

// New connections and their handshakes.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/engine_parts.h"
#include "core/left_out.h"
#include "core/peers.h"
#include "core/take_if.h"

namespace telegrad {

ConnectionPtr Peers::add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator) {
  if (parts_.settings.faults) link = add_faults(std::move(link), parts_.settings.faults);
  link->set_limits(kHandshakeLimits);
  link->set_budget(parts_.budget);
  auto c = std::make_shared<Connection>(next_token_++, std::move(link), std::move(handshake), initiator);
  c->handshake_deadline = now() + parts_.settings.handshake_timeout;
  connections_.emplace(c->id, c);
  parts_.leader.add_fd(c->link->fd(), c->id);
  if (c->link->lanes_fd() >= 0) parts_.leader.add_fd(c->link->lanes_fd(), c->id | kLanesBit);
  arm_timer(c->handshake_deadline);
  parts_.detector.add(*c);
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
    const PeerCredentials user = peer_credentials_of(*c->link);
    if (const auto why = rejection_reason(user)) return close_connection(c, *why);
    c->is_local = user.kind == PeerCredentials::Kind::kUser;
    c->user_checked = true;
  }
  Handshake::Step step;
  try {
    step = c->handshake.on_frame(type, body);
  } catch (const std::exception& e) {  // no random bytes
    return close_connection(c, e.what());
  }
  c->answer = c->handshake.answer();
  if (step.proven) {
    const std::string& name = c->handshake.peer().name;
    c->link->set_peer_name(name);
    if (c->link->is_certified_for(name)) return on_proven(c);
    step = c->handshake.refuse(OfferAnswer::kAccept, "the certificate of worker " + name + " has another name");
  }
  take_step(c, step);
}

void Peers::take_step(const ConnectionPtr& c, const Handshake::Step& step) {
  if (step.send) {
    if (parts_.sender.transmit(c, frame(step)) == SendResult::kBroken) return;
  }
  if (!step.failed.empty()) return close_connection(c, {step.failed, step.code});
  if (step.open && c->handshake.for_lane()) return attach_lane(c);
  if (step.open && c->handshake.purpose() == Purpose::kResume) return resume_session(c);
  if (step.open) on_open(c);  // after the welcome, which must be the first frame on the link
}

void Peers::on_open(const ConnectionPtr& c) {
  std::deque<PendingMessage> pending, dropped;
  Released released;
  MutexLock sending(c->send_mutex);  // waiting messages are sent before new ones
  {
    Lock lock(parts_.mutex);
    if (!has_connection(c->id)) return;  // lost meanwhile
    const Identity& remote = c->handshake.peer();
    Peer& peer = add_peer(remote.id);
    const bool with_session = has_session(*c);
    if (with_session && !begin_session(c, peer)) return;
    if (!with_session && c->initiator) {
      peer.connection = std::move(peer.dial);
      peer.connecting = false;
    }
    c->state = Connection::State::kOpen;
    c->was_open = true;
    c->peer = remote.id;
    c->limits = c->handshake.limits();
    const Limits& mine = parts_.settings.handshake.limits;
    c->max_in_flight = std::min(c->limits.requests, mine.requests);
    c->max_in_flight_bytes =
        static_cast<std::int64_t>(std::min({c->limits.request_bytes, mine.request_bytes, kMostBytes}));
    c->link->set_limits(mine);
    c->resumes = with_session && c->handshake.resumes() && c->link->resumable();
    if (c->resumes) c->link->resumable()->keep();
    if (with_session) log_open(*c, peer);
    if (peer.connection == c) pending = take_pending(*c, peer, dropped, released);
    parts_.leader.notify_progress();
  }
  parts_.sender.send_pending(c, pending);
}

/// Reports a session, and a transport that did not work.
void Peers::log_open(const Connection& c, const Peer& peer) {
  const Identity& remote = c.handshake.peer();
  const std::string address = c.link->describe();
  if (c.initiator && !peer.last_error.text.empty() && address != peer.addresses.front()) {
    parts_.queue.log("worker " + remote.name + " is reached at " + address +
                     ", because a faster transport failed: " + peer.last_error.text);
  }
  const std::string from = c.source.empty() ? "" : ":" + c.source;
  push_event(EventKind::kConnected, remote,
             remote.name + (c.initiator ? " to " + address : " from " + address.substr(0, address.find(':')) + from));
}

/// Takes the messages that have waited for the connection. Those in `dropped` are not sent: the caller has given up,
/// the message is too large, or it belongs to an ended session.
std::deque<PendingMessage> Peers::take_pending(Connection& c, Peer& peer, std::deque<PendingMessage>& dropped,
                                               Released& released) {
  auto pending = peer.pending.take();
  std::size_t requests = 0;
  dropped = take_if(pending, [&](PendingMessage& w) REQUIRES(engine_mutex) {
    const bool sends = must_send(c, peer, requests, *w.message, released);
    if (sends && w.message->header.type == FrameType::kRequest) ++requests;
    if (!sends && w.message->pending_send) w.message->pending_send->done = true;
    return !sends;
  });
  return pending;
}

/// `earlier`: number of requests that are sent before.
bool Peers::must_send(Connection& c, const Peer& peer, std::size_t earlier, Outgoing& m, Released& released) {
  const bool request = m.header.type == FrameType::kRequest;
  const std::uint64_t id = request ? m.header.call_id : 0;
  if (parts_.sender.reject_outdated(peer, id, m, released) || parts_.sender.reject_oversized(c, id, m, released))
    return false;
  if (!request) return true;
  if (parts_.overload.reject_pending(id, c, earlier, m, released)) return false;
  parts_.calls.set_connection(id, c.id);
  const Call* call = parts_.calls.find(id);
  if (!call || call->status != CallStatus::kPending) {
    if (!(m.header.flags & kMustDeliver)) return false;
    if (may_leave_out(m.header)) leave_out(m, LeftOut::kCanceled, "");  // the callee counts on it, but need not run it
  }
  c.in_flight_bytes.add(id, weight(m.payload_size()));
  return true;
}

}  // namespace telegrad

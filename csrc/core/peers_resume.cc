// Sessions whose connection has broken: they continue on another one. See core/resumption.h.
//
// A suspended session keeps its Connection, its calls and its references; messages wait in its queue. It ends
//     at once    if the kernel says that the process of the peer is gone: on this host, nothing listens at its address
//     at once    if the peer refuses, because the session has ended at its side
//     later      when the failure detector has had no sign of life for too long
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/engine_parts.h"
#include "core/peers.h"
#include "core/tuning.h"

namespace telegrad {
// ---- the break

void Peers::on_broken(const ConnectionPtr& c) {
  const LinkError why = c->link->error();
  if (suspend(c, why)) {
    attempt(c);
  } else {
    close_connection(c, why);
  }
}

/// Suspends the session of a connection that has broken. Returns false if it is to end.
bool Peers::suspend(const ConnectionPtr& c, const LinkError& why) {
  const Resumable* link = c->link->resumable();
  if (!c->resumes || c->goodbye || !link->may_resume()) return false;
  MutexLock sending(c->send_mutex);
  Lock lock(parts_.mutex);
  const Peer* peer = find(c->peer);
  if (parts_.is_stopping() || !has_connection(c->id) || !peer || peer->removed || peer->connection != c) return false;
  const Resumable::Waiting waiting = link->waiting();
  if (!c->resumption.suspend(waiting.first, waiting.any)) return false;
  c->broken = why;
  detach_link(*c);
  return true;
}

/// Closes the connection of a session; returns how many messages have arrived.
std::uint64_t Peers::detach_link(Connection& c) {
  for (const int fd : {c.link->fd(), c.link->lanes_fd()}) parts_.leader.remove_fd(fd);
  c.watching_writable = false;
  c.buffered = 0;
  c.verify_until = kNever;
  const std::uint64_t received = c.link->resumable()->suspend();
  if (c.link->resumable()->has_unverified()) request_verification(c);
  return received;
}

// ---- verification: messages with memory that may have changed

/// Lets a thread of the pool call `verify`; it also releases what has been given up.
void Peers::request_verification(const Connection& c) {
  WorkItem item;
  item.kind = WorkKind::kVerify;
  item.connection = c.id;
  parts_.queue.push(std::move(item));
  parts_.queue.wake_for_work();
}

bool Peers::is_resumable(std::uint64_t id) const {
  Lock lock(parts_.mutex);
  const ConnectionPtr c = find_connection(id);
  return c && c->resumes;
}

bool Peers::may_be_resumable(std::int32_t id) const {
  Lock lock(parts_.mutex);
  const auto found = peers_.find(id);
  const ConnectionPtr c = found == peers_.end() ? nullptr : found->second.connection;
  return c ? c->resumes : parts_.settings.handshake.resume;
}

void Peers::verify(std::uint64_t id) {
  ConnectionPtr c;
  {
    Lock lock(parts_.mutex);
    c = find_connection(id);
  }
  if (!c) return;
  c->link->resumable()->verify();
  {
    Lock lock(parts_.mutex);
    if (!c->link->resumable()->has_unverified()) c->verify_until = kNever;
  }
  parts_.sender.flush_by_leader(c);
}

/// Limits the time for which the messages of a continued session wait, because the program holds the GIL.
void Peers::set_verify_limit(Connection& c) {
  if (!c.link->resumable()->has_unverified()) return;
  c.verify_until = now() + std::min(kVerifyLimit, c.silence.interval() / 2);
  arm_timer(c.verify_until);
}

void Peers::give_up_verifying(const ConnectionPtr& c) {
  const bool rest = c->link->resumable()->give_up_verifying();
  {
    Lock lock(parts_.mutex);
    if (rest) set_verify_limit(*c);
    request_verification(*c);
  }
  parts_.sender.flush_by_leader(c);
}

// ---- attempts

/// Returns whether a session is open and no attempt to continue it is under way.
bool Peers::may_attempt(const Connection& c) const {
  return has_connection(c.id) && !parts_.is_stopping() && !c.dialing && !c.next_link;
}

/// Tries to continue a suspended session; the end that was dialed checks whether the peer still exists.
void Peers::attempt(const ConnectionPtr& c) {
  std::vector<std::string> addresses;
  {
    Lock lock(parts_.mutex);
    if (!may_attempt(*c) || !c->resumption.is_suspended()) return;
    c->attempt_at = kNever;
    c->dialing = c->initiator;
    const Peer* peer = find(c->peer);
    if (peer && !c->initiator) addresses = peer->addresses;
  }
  if (c->initiator) return dial_again(c);
  if (!c->is_local) return;
  for (const std::string& address : addresses) {
    Transport* const transport = find_transport(address);
    if (!transport || !transport->is_resumable()) continue;
    if (transport->is_refused(address, parts_.settings.security)) return close_connection(c, c->broken);
    return schedule_attempt(c);
  }
}

void Peers::schedule_attempt(const ConnectionPtr& c) {
  Lock lock(parts_.mutex);
  if (!has_connection(c->id) || !c->resumption.is_suspended()) return;
  c->attempt_at = now() + c->resumption.next_pause(kMinRetryDelay, kMaxRetryDelay);
  arm_timer(c->attempt_at);
}

/// Begins an attempt. The caller has set `dialing`, so there is no other.
void Peers::dial_again(const ConnectionPtr& c) {
  ConnectionPtr next;
  std::optional<Handshake::Step> hello;
  std::unique_ptr<Link> link;
  bool refused = false;
  try {
    const std::string address = c->link->describe();
    link = find_transport(address)->connect(address, parts_.settings.security);
  } catch (const std::system_error& e) {
    refused = e.code().value() == ECONNREFUSED;
  } catch (const std::exception&) {  // no memory
  }
  try {
    Lock lock(parts_.mutex);
    c->dialing = false;
    if (!may_attempt(*c)) return;  // the session has ended meanwhile
    if (link) {
      Handshake handshake =
          Handshake::initiate(parts_.settings.handshake, c->handshake.peer(),
                              {.number = c->resumption.dial(), .previous = {}}, Purpose::kResume, c->handshake.link());
      hello = handshake.begin();
      next = add_connection(std::move(link), std::move(handshake), true);
      next->continues = c;
      next->peer = c->peer;
      next->handshake_deadline = std::min(next->handshake_deadline, now() + c->silence.interval() / 2);
      arm_timer(next->handshake_deadline);
      c->next_link = next;
      if (!parts_.leader.exists()) parts_.leader.watch_links();
    }
  } catch (const std::exception&) {  // no random bytes
  }
  if (!next) return on_attempt_failed(c, refused);
  parts_.sender.transmit(next, frame(*hello));
}

/// `refused`: nothing listens at the address of the peer.
void Peers::on_attempt_failed(const ConnectionPtr& c, bool refused) {
  if (refused && c->is_local && is_suspended(*c)) return close_connection(c, c->broken);
  schedule_attempt(c);
}

/// Processes the end of a connection that was to continue a session, and did not.
void Peers::on_next_link_failed(const ConnectionPtr& next, const LinkError& why) {
  const ConnectionPtr c = next->continues;
  const OfferAnswer answer = next->answer;
  if (answer == OfferAnswer::kStale) return close_connection(c, why);
  if (answer == OfferAnswer::kEnded)
    return close_connection(c, is_suspended(*c) ? c->broken : "its worker has ended the session");
  on_attempt_failed(c, why.code == ECONNREFUSED);
}

/// Makes another connection for a session whose peer is silent: a NAT or firewall may have dropped the present one.
void Peers::renew(const ConnectionPtr& c) {
  if (!c->initiator || !c->resumes) return;
  {
    Lock lock(parts_.mutex);
    if (!may_attempt(*c) || c->resumption.is_suspended()) return;
    c->dialing = true;
  }
  dial_again(c);
}

std::string Peers::why_suspended(const Connection& c) const {
  Lock lock(parts_.mutex);
  if (!c.resumption.is_suspended()) return {};
  return c.broken.text.empty() ? "the connection was closed without a goodbye" : c.broken.text;
}

bool Peers::is_suspended(const Connection& c) const {
  Lock lock(parts_.mutex);
  return c.resumption.is_suspended();
}

// ---- the handshake

/// Continues a handshake for the continuation of a session; the peer has proven its identity.
void Peers::on_resume_proven(const ConnectionPtr& next) {
  ConnectionPtr c;
  std::optional<Handshake::Step> step;
  {
    Lock lock(parts_.mutex);
    if (!has_connection(next->id)) return;
    c = session_of(*next);
    const Peer* peer = next->initiator ? nullptr : find(next->handshake.peer().id);
    if (peer && peer->identity.name == next->handshake.peer().name) step = refuse_older(next->handshake, *peer);
  }
  Handshake& handshake = next->handshake;
  bool lost = false;
  if (c && !step) {
    MutexLock sending(c->send_mutex);
    Lock lock(parts_.mutex);
    if (!has_connection(next->id)) return;  // so another attempt may follow
    const bool open = has_connection(c->id) && !parts_.is_stopping() && c->link->resumable()->may_resume();
    if (open && !c->initiator && !c->resumption.accept(handshake.offer().number)) {
      step = handshake.refuse(OfferAnswer::kOutdated, "a newer connection continues the session");
    } else if (open) {
      if (!c->resumption.is_suspended()) {
        const Resumable::Waiting waiting = c->link->resumable()->waiting();
        lost = !c->resumption.suspend(waiting.first, waiting.any);
        c->broken = c->initiator ? "it gave no sign of life" : "its worker has connected again";
      }
      next->continues = c;
      const std::uint64_t received = detach_link(*c);
      if (!lost) step = handshake.proceed(received);
    }
  }
  if (!step) step = handshake.refuse(OfferAnswer::kEnded, "the session has ended");
  next->superseded = !step->failed.empty();  // not to be logged
  take_step(next, *step);
  if (lost) close_connection(c, c->broken);
}

/// Returns the session that a connection is to continue; null if it has ended.
ConnectionPtr Peers::session_of(const Connection& next) const {
  const Identity& remote = next.handshake.peer();
  if (next.initiator) {
    const ConnectionPtr& c = next.continues;
    return has_connection(c->id) && c->handshake.peer().incarnation == remote.incarnation ? c : nullptr;
  }
  for (const auto& [token, c] : connections_) {
    const bool same = c->resumes && c->state == Connection::State::kOpen && !c->initiator && c->peer == remote.id &&
                      c->handshake.peer().incarnation == remote.incarnation &&
                      c->handshake.link() == next.handshake.link();
    if (same) return c;
  }
  return nullptr;
}

/// Continues a session on a connection whose handshake has ended. Leader only.
void Peers::resume_session(const ConnectionPtr& next) {
  const ConnectionPtr c = next->continues;
  bool welcomed, taken;
  {
    MutexLock sending(next->send_mutex);
    welcomed = next->queue.empty();
  }
  if (!welcomed) return close_connection(next, "its welcome could not be sent");
  {
    MutexLock sending(c->send_mutex);
    Lock lock(parts_.mutex);
    const bool open = has_connection(c->id) && has_connection(next->id);
    if (!open || !c->resumption.is_suspended() || (c->initiator && c->next_link != next)) {
      lock.unlock();
      return close_connection(next, open ? "another connection continues the session" : "the session has ended");
    }
    for (const int fd : {next->link->fd(), next->link->lanes_fd()}) parts_.leader.remove_fd(fd);
    taken = c->link->resumable()->resume(*next->link, next->handshake.received());
    if (taken) {
      parts_.leader.mark_closed(*next);  // it is no longer a connection of its own
      next->continues.reset();
      connections_.erase(next->id);
      parts_.leader.add_fd(c->link->fd(), c->id);
      if (c->link->lanes_fd() >= 0) parts_.leader.add_fd(c->link->lanes_fd(), c->id | kLanesBit);
      parts_.detector.resume(*c);
      c->resumption.resume();
      c->broken = {};
      c->next_link.reset();
      c->has_asked_for_lanes = false;
      set_verify_limit(*c);
      new_lane_links_.push_back(c);
    }
  }
  if (taken) return parts_.sender.flush(c);
  close_connection(next, LinkError());
  close_connection(c, "it states other messages than this worker has sent");
}

}  // namespace telegrad

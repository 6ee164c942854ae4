// The peers of an engine and the connections to them: listening, connecting on first use, handshakes, lanes, and the
// end of connections.
//
// A connection opens once both ends have proven their identity and agree that it carries their session
// (core/session.h). A peer has at most one open connection. Its end is the end of the session: it fails the calls of
// the peer, and queues an event.
//
// Order. The layer above acknowledges each event of a session. The next session does not open before that, at either
// end, so nothing of it is processed before the layer above knows of the end of the last one. The layer above divides
// its own messages in the same way, with `Outgoing::epoch`: a message that belongs to an ended session is not sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/peer_credentials.h"
#include "base/thread_safety.h"
#include "core/connection.h"
#include "core/sender.h"
#include "core/session.h"
#include "core/settings.h"

namespace telegrad {

struct EngineParts;
struct Snapshot;

struct Peer {
  explicit Peer(bool wins) : agreement(wins) {}

  Identity identity;
  std::vector<std::string> addresses;
  std::size_t next_address = 0;
  bool connecting = false;
  bool may_recover = false;  // an address tried in this round may still succeed
  Nanos retry_after = 0;     // pause before the next round
  Nanos retry_at = kNever;
  bool removed = false;       // no member: see Peers::mark_removed
  std::uint64_t removal = 0;  // its number, if it is removed
  int held = 0;               // threads that use it while they have released the mutex
  bool was_lost = false;
  bool announced = false;  // kPeerBack has been queued, but the session has not begun: it begins, or the peer is lost
  LinkError last_error;
  PendingMessages pending;

  SessionAgreement agreement;
  std::uint64_t newest = 0;           // incarnation, also while the sessions of older ones end
  ConnectionPtr connection;           // open: the session
  ConnectionPtr dial;                 // the connection that this end initiates
  ConnectionPtr connection_to_open;   // accepted; its welcome is being sent
  int unacknowledged = 0;             // events of sessions
  std::vector<ConnectionPtr> proven;  // handshakes that wait for these events
  std::int64_t epoch = 0;             // of the messages that the layer above makes now
};

inline bool Sender::reject_outdated(const Peer& peer, std::uint64_t id, const Outgoing& m, Released& released) {
  if (m.epoch == kAnyEpoch || m.epoch == peer.epoch) [[likely]]
    return false;
  fail_outdated(id, released);
  return true;
}

/// Bit of a connection's token that means its `lanes_fd`.
inline constexpr std::uint64_t kLanesBit = std::uint64_t{1} << 63;

class Peers {
 public:
  explicit Peers(EngineParts& parts) : parts_(parts) {}

  // ---- see the functions of the engine

  std::string listen(const std::string& address) EXCLUDES(engine_mutex);
  void set_peer(PeerAddress peer) EXCLUDES(engine_mutex);
  void remove_peer(std::int32_t id, const std::string& why, std::uint64_t incarnation) EXCLUDES(engine_mutex);
  void disconnect(std::int32_t id, const std::string& why, std::uint64_t incarnation) EXCLUDES(engine_mutex);
  void acknowledge(std::int32_t id) EXCLUDES(engine_mutex);
  void set_epoch(std::int32_t id, std::int64_t epoch) EXCLUDES(engine_mutex);
  std::int64_t epoch_of(std::int32_t id) const EXCLUDES(engine_mutex);
  bool is_open(std::uint64_t connection) const EXCLUDES(engine_mutex);
  /// See the functions of the engine.
  bool is_resumable(std::uint64_t connection) const EXCLUDES(engine_mutex);
  bool may_be_resumable(std::int32_t peer) const EXCLUDES(engine_mutex);
  void verify(std::uint64_t connection) EXCLUDES(engine_mutex);

  // ---- peers

  /// Returns null if the peer is unknown.
  Peer* find(std::int32_t id) REQUIRES(engine_mutex);
  /// Tries the addresses of the peer, starting after the last one. Releases the mutex while HELLO is sent.
  void connect(Lock& lock, Peer& peer) REQUIRES(engine_mutex);
  /// Makes `on_timer` due.
  void arm_timer(Nanos at) REQUIRES(engine_mutex);
  /// Ends late handshakes, fails calls that have waited too long for a connection, and connects again, if one is due.
  void on_timer(Lock& lock, Nanos at) REQUIRES(engine_mutex);
  /// Returns whether a message waits for a connection that is being made.
  bool has_pending() const REQUIRES(engine_mutex);
  void describe(Snapshot& out) const REQUIRES(engine_mutex);  // snapshot.cc
  /// Gives up a peer without a connection: fails the messages that wait for it.
  void give_up(Peer& peer, const LinkError& why, Released& released) REQUIRES(engine_mutex);
  /// Returns the number of peers that are not removed.
  std::size_t count() const REQUIRES(engine_mutex) { return peers_.size() - removed_.size(); }
  /// Returns the greatest number of messages that wait for a connection to one peer.
  std::size_t most_pending() const REQUIRES(engine_mutex);
  /// Returns the same of the bytes that count against the send queue.
  std::int64_t most_pending_bytes() const REQUIRES(engine_mutex);
  std::int64_t most_pending_requests() const REQUIRES(engine_mutex);  // bytes of large ones
  /// Fails the messages that wait for a connection, and stops listening, because the engine stops.
  void stop(const std::string& why, Released& released) REQUIRES(engine_mutex);
  void stop_listening() REQUIRES(engine_mutex) { listeners_.clear(); }

  // ---- connections

  /// Returns how many connections may be accepted before their handshake has ended.
  std::uint64_t max_unauthenticated() const;
  /// Returns null if it has closed.
  ConnectionPtr find_connection(std::uint64_t id) const REQUIRES(engine_mutex) {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Listener> find_listener(std::uint64_t token) const REQUIRES(engine_mutex);
  const std::unordered_map<std::uint64_t, ConnectionPtr>& connections() const REQUIRES(engine_mutex) {
    return connections_;
  }
  bool has_connection(std::uint64_t id) const REQUIRES(engine_mutex) { return connections_.contains(id); }
  /// Suspends the session of a connection that has broken, or closes the connection. Leader only.
  void on_broken(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  /// Makes another connection for a session whose peer is silent.
  void renew(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  bool is_suspended(const Connection& c) const EXCLUDES(engine_mutex);
  /// Returns why the connection of a suspended session broke; "" if the session is not suspended.
  std::string why_suspended(const Connection& c) const EXCLUDES(engine_mutex);
  /// Closes a connection. The first report of its end has the reason. Any thread.
  void close_connection(const ConnectionPtr& c, LinkError why) EXCLUDES(engine_mutex);
  /// Marks all connections to the peer of `c` for a plain end: the peer may not have sent a goodbye on each.
  void on_goodbye(const Connection& c) EXCLUDES(engine_mutex);

  // ---- leader only

  void accept_from(Listener& listener) EXCLUDES(engine_mutex);
  void on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body) EXCLUDES(engine_mutex);
  /// Continues the handshakes that have waited for an event.
  void resume_handshakes() EXCLUDES(engine_mutex);
  bool has_resumable() const { return has_resumable_.load(std::memory_order_relaxed); }
  /// Opens lanes if the link wants some after large messages.
  void open_lanes(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  /// Returns the connections that have got a lane since the last call; data may have arrived on it.
  std::vector<ConnectionPtr> take_new_lane_links() { return std::exchange(new_lane_links_, {}); }
  bool has_new_lane_links() const { return !new_lane_links_.empty(); }

  /// Closes the descriptors; the links belong to the parent.
  void abandon_in_child() REQUIRES(engine_mutex);

 private:
  static constexpr std::uint64_t kFirstToken = 16;  // of connections and listeners; the leader has smaller ones

  void run_timer(Lock& lock, Nanos at) REQUIRES(engine_mutex);
  ConnectionPtr add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator) REQUIRES(engine_mutex);
  void unreachable(Peer& peer, const LinkError& why, Released& released) REQUIRES(engine_mutex);
  void fail_pending(PendingMessage&& pending, const LinkError& why, Released& released) REQUIRES(engine_mutex);
  void expire_pending(Peer& peer, Nanos at, Released& released) REQUIRES(engine_mutex);

  // peers_closing.cc
  void on_open_closed(const ConnectionPtr& c, Peer* peer, const LinkError& why, bool parted, Released& released)
      REQUIRES(engine_mutex);
  void on_accepted_closed(Lock& lock, const ConnectionPtr& c, const LinkError& why, const std::string& text)
      REQUIRES(engine_mutex);
  void on_lane_closed(const Connection& lane, const std::string& why) REQUIRES(engine_mutex);
  void on_dial_failed(Lock& lock, const ConnectionPtr& c, Peer& peer, const LinkError& why, bool may_be_there,
                      Released& released) REQUIRES(engine_mutex);

  // peers_accept.cc
  void pause_listening(const Listener& listener) REQUIRES(engine_mutex);
  void resume_listening(Nanos at) REQUIRES(engine_mutex);
  ConnectionPtr connection_to_displace(const std::string& source, std::size_t places) const REQUIRES(engine_mutex);
  PeerCredentials peer_credentials_of(const Link& link);
  static std::optional<std::string> rejection_reason(const PeerCredentials& user);
  void log_rejected(const Link& link, const std::string& source, const std::string& why, bool displaced = false)
      REQUIRES(engine_mutex);

  // peers_handshake.cc
  void take_step(const ConnectionPtr& c, const Handshake::Step& step) EXCLUDES(engine_mutex);
  void on_open(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void log_open(const Connection& c, const Peer& peer) REQUIRES(engine_mutex);
  std::deque<PendingMessage> take_pending(Connection& c, Peer& peer, std::deque<PendingMessage>& dropped,
                                          Released& released) REQUIRES(engine_mutex);
  bool must_send(Connection& c, const Peer& peer, std::size_t earlier, Outgoing& m, Released& released)
      REQUIRES(engine_mutex);
  static std::unique_ptr<Outgoing> frame(const Handshake::Step& step);

  // peers_sessions.cc
  Peer& add_peer(std::int32_t id) REQUIRES(engine_mutex);
  void mark_removed(std::int32_t id, Peer& peer) REQUIRES(engine_mutex);
  void mark_present(Peer& peer) REQUIRES(engine_mutex);
  void forget_removed() REQUIRES(engine_mutex);
  bool has_session(const Connection& c) const REQUIRES(engine_mutex);
  void push_event(EventKind kind, const Identity& peer, std::string text = {}) REQUIRES(engine_mutex);
  void push_session_event(EventKind kind, Peer& peer, const Identity& identity, std::string text = {})
      REQUIRES(engine_mutex);
  void on_proven(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  std::optional<Handshake::Step> decide(const ConnectionPtr& c, std::vector<ConnectionPtr>& ended)
      REQUIRES(engine_mutex);
  static std::string replaced_by(const Identity& newer);
  static std::optional<Handshake::Step> refuse_older(Handshake& handshake, const Peer& peer) REQUIRES(engine_mutex);
  void stop_opening(Lock& lock, const ConnectionPtr& c) REQUIRES(engine_mutex);
  void retry(Lock& lock, Peer& peer) REQUIRES(engine_mutex);
  bool begin_session(const ConnectionPtr& c, Peer& peer) REQUIRES(engine_mutex);
  void end_session(const ConnectionPtr& c, Peer& peer, const std::string& why, bool parted) REQUIRES(engine_mutex);

  // peers_lanes.cc
  void open_lane(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void attach_lane(const ConnectionPtr& lane) EXCLUDES(engine_mutex);

  // peers_resume.cc
  bool suspend(const ConnectionPtr& c, const LinkError& why) EXCLUDES(engine_mutex);
  std::uint64_t detach_link(Connection& c) REQUIRES(engine_mutex, c.send_mutex);
  void request_verification(const Connection& c) REQUIRES(engine_mutex);
  void set_verify_limit(Connection& c) REQUIRES(engine_mutex);
  void give_up_verifying(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  bool may_attempt(const Connection& c) const REQUIRES(engine_mutex);
  void attempt(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void schedule_attempt(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void dial_again(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void on_attempt_failed(const ConnectionPtr& c, bool refused) EXCLUDES(engine_mutex);
  void on_next_link_failed(const ConnectionPtr& next, const LinkError& why) EXCLUDES(engine_mutex);
  void on_resume_proven(const ConnectionPtr& next) EXCLUDES(engine_mutex);
  ConnectionPtr session_of(const Connection& next) const REQUIRES(engine_mutex);
  void resume_session(const ConnectionPtr& next) EXCLUDES(engine_mutex);

  EngineParts& parts_;
  std::uint64_t next_token_ GUARDED_BY(engine_mutex) = kFirstToken;
  std::unordered_map<std::uint64_t, ConnectionPtr> connections_ GUARDED_BY(engine_mutex);
  std::unordered_map<std::uint64_t, std::shared_ptr<Listener>> listeners_ GUARDED_BY(engine_mutex);
  std::map<std::int32_t, Peer> peers_ GUARDED_BY(engine_mutex);
  std::map<std::uint64_t, std::int32_t> removed_ GUARDED_BY(engine_mutex);  // ids of removed peers, by `Peer::removal`
  std::uint64_t removals_ GUARDED_BY(engine_mutex) = 0;
  bool has_forgotten_ GUARDED_BY(engine_mutex) = false;
  std::vector<ConnectionPtr> resumable_ GUARDED_BY(engine_mutex);  // handshakes to continue
  std::atomic<bool> has_resumable_ = false;
  Nanos timer_at_ GUARDED_BY(engine_mutex) = kNever;         // when a handshake expires or a reconnect is due
  Nanos listen_again_at_ GUARDED_BY(engine_mutex) = kNever;  // when paused listeners are polled again
  Nanos rejected_since_ GUARDED_BY(engine_mutex) = 0;  // start of the interval of `rejected_` rejected connections
  std::size_t rejected_ GUARDED_BY(engine_mutex) = 0;
  Nanos displaced_logged_at_ GUARDED_BY(engine_mutex) = -3600 * kSecond;  // when displaced ones were last logged

  // Leader only.
  std::vector<ConnectionPtr> new_lane_links_;
  CredentialLookup users_;
  std::unique_ptr<Link> accepting_;  // accepted; the user of its peer is being looked up
};

}  // namespace telegrad

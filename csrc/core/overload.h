// Limits of what a worker keeps at the same time (LoadLimits, Limits::requests), and the messages over them.
//
// Each limit is an option of the program. The reason of an error begins with the option's name and a colon.
//
//     limit                 at the sender                              at the receiver, which trusts no peer
//     max_call_depth        the call fails                             the request is answered without its content
//     max_in_flight         the caller waits; a call that cannot wait  a peer with far more requests is disconnected
//                           fails
//     max_in_flight_bytes   like max_in_flight, for large requests     like max_in_flight
//     send_queue_bytes      the call fails, also without a             -
//                           connection; a large reply loses its
//                           content; far more forced messages end
//                           the session, or in the peer's loss
//     max_waiting_messages  like max_in_flight, without a connection;  a request that would wait for a reference fails
//                           one-way messages end in the peer's loss
//     max_peers             -                                          a further peer is refused
//
// A call that cannot wait is one inside a handler, because the reply for which it would wait may need that handler, or
// one on an event loop. A request whose trailer the peer counts on (kMustDeliver) is sent without its content instead.
//
// Messages for which the send queue had room are admitted (Outgoing::admitted): however many wait, they never end a
// session. All others that no thread waits for are forced: one-way messages, small replies, requests without content,
// and messages whose threads have stopped waiting.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_safety.h"
#include "core/call_options.h"
#include "core/connection.h"
#include "core/limits.h"
#include "core/message.h"

namespace telegrad {

class PendingMessages;
struct EngineParts;
struct Peer;
struct Snapshot;

enum class Limit : std::uint8_t {
  kCallDepth,
  kInFlight,
  kInFlightBytes,
  kWindow,  // refuses nothing
  kSendQueue,
  kWaitingMessages,
  kArenas,
  kLeased,  // refuses nothing
  kPeers,
  kUnauthenticated,
  kHeader,
  kMessage,
  kNames,
  kUnacknowledged,  // refuses nothing
  kCount,
};

class Overload {
 public:
  /// `of_peers`: announced to peers, for their requests without a reply.
  Overload(EngineParts& parts, const LoadLimits& limits, const Limits& of_peers);

  // ---- at the caller

  /// Returns whether a call need not be checked by `reject`. For most calls.
  bool is_light(const Connection& c, const CallOptions& o) const {
    return o.depth <= limits_.call_depth && c.kept_bytes.load(std::memory_order_relaxed) == 0;
  }
  /// Checks a request to a peer. Returns true if it is over a limit: it is not sent, and its call has failed. `size`:
  /// what it counts against the window.
  bool reject(std::uint64_t id, std::int32_t peer, std::int64_t size, Outgoing& m, const CallOptions& o,
              Released& released) REQUIRES(engine_mutex);
  /// Checks a request that has waited for this connection, after `earlier` others, like `reject`.
  bool reject_pending(std::uint64_t id, const Connection& c, std::size_t earlier, Outgoing& m, Released& released)
      REQUIRES(engine_mutex);
  /// Returns whether a request of this size need not wait for the peer.
  bool has_room(std::int32_t peer, std::int64_t size) REQUIRES(engine_mutex);

  // ---- queues

  /// Returns whether a connection has no room for `size` more bytes that no thread waits for. Any size may be the
  /// first.
  bool is_queue_full(const Connection& c, std::int64_t size) const {
    return is_queue_full(c.kept_bytes.load(std::memory_order_relaxed), size);
  }
  /// Removes the content of a large reply for which the queue has no room. `size`: what the reply counts against the
  /// reply window. Returns whether it did.
  bool check_reply(const Connection& c, std::int64_t size, Outgoing& m) {
    return size >= static_cast<std::int64_t>(kAlwaysTaken) && is_queue_full(c, size) && leave_out_reply(c, m);
  }
  /// Ends a session if far too much is queued for the peer: forced messages.
  void check_queue(const ConnectionPtr& c) REQUIRES(c->send_mutex) EXCLUDES(engine_mutex) {
    if (c->forced_bytes.load(std::memory_order_relaxed) > hard_queue()) [[unlikely]]
      end_later(c);
  }
  /// Returns the connections to close because of their queues, with the reason.
  std::vector<std::pair<ConnectionPtr, std::string>> take_overfull() REQUIRES(engine_mutex);
  /// Returns the reason why a peer without a connection is lost, because far too many forced messages wait; "" if it is
  /// not.
  std::string pending_reason(const Peer& peer);

  // ---- at the callee

  /// Removes the content of an arrived request that is nested too deeply.
  void check_depth(Incoming& request) {
    if (request.header.depth > limits_.call_depth) [[unlikely]]
      leave_out_deep(request);
  }
  /// Counts a request of a peer. Returns false if the peer is to be disconnected, with `flood_reason`.
  bool count_request(Connection& c) const {
    return c.unanswered.fetch_add(1, std::memory_order_relaxed) < hard_requests_;
  }
  std::string flood_reason();
  /// Counts the bytes of a request of a peer. Returns false if the peer is to be disconnected, with `bytes_reason`.
  bool admit_bytes(Connection& c, std::uint64_t call, std::int64_t size) const REQUIRES(engine_mutex) {
    if (!RequestBytes::is_counted(size) && c.unanswered_bytes.empty()) [[likely]]
      return true;
    return count_bytes(c, call, size);
  }
  std::string bytes_reason();
  /// Returns the reason why a further peer is refused, or "".
  std::string peer_reason() REQUIRES(engine_mutex);

  // ---- figures

  /// Counts a refusal.
  void count(Limit limit) { refused_[static_cast<std::size_t>(limit)].fetch_add(1, std::memory_order_relaxed); }
  /// Counts a message of this worker that its receiver does not take.
  void count_oversized(const Outgoing& m, const Limits& of_receiver) {
    count(m.body.size() > of_receiver.body ? Limit::kHeader : Limit::kMessage);
  }
  /// Records the size of an arrived message, and returns its bytes. Leader only.
  std::uint64_t record_size(const Incoming& m) {
    const std::uint64_t body = m.header.body_size;
    if (body > largest_body_.load(std::memory_order_relaxed)) [[unlikely]]
      largest_body_.store(body, std::memory_order_relaxed);
    if (m.segments.empty()) return body;
    std::uint64_t segments = 0;
    for (const auto& segment : m.segments) segments += segment->size();
    if (segments > largest_segments_.load(std::memory_order_relaxed)) [[unlikely]]
      record_segments(m, segments);
    return body + segments;
  }
  void describe(Snapshot& out) REQUIRES(engine_mutex);  // snapshot.cc

 private:
  bool is_queue_full(std::int64_t kept, std::int64_t size) const {
    return kept > 0 && kept + size > static_cast<std::int64_t>(limits_.send_queue);
  }
  bool leave_out_reply(const Connection& c, Outgoing& m);
  void record_segments(const Incoming& m, std::uint64_t size);
  void leave_out_deep(Incoming& request);
  void end_later(const ConnectionPtr& c) REQUIRES(c->send_mutex) EXCLUDES(engine_mutex);
  std::int64_t hard_queue() const;
  std::uint64_t max_waiting() const;
  bool has_free_bytes(const PendingMessages& pending, std::int64_t size) const;
  bool count_bytes(Connection& c, std::uint64_t call, std::int64_t size) const;
  std::string reason(std::int32_t peer, std::int64_t size, const Outgoing& m, const CallOptions& o)
      REQUIRES(engine_mutex);
  bool fail(std::uint64_t id, std::string why, Outgoing& m, Released& released) REQUIRES(engine_mutex);

  EngineParts& parts_;
  const LoadLimits limits_;
  const std::int64_t hard_requests_;
  const std::int64_t hard_request_bytes_;
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Limit::kCount)> refused_{};  // by limit
  std::atomic<std::uint64_t> largest_body_ = 0;      // of the messages that have arrived,
  std::atomic<std::uint64_t> largest_segments_ = 0;  // and of the tensors of one
  std::vector<ConnectionPtr> overfull_ GUARDED_BY(engine_mutex);
};

}  // namespace telegrad

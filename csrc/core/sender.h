// Sending: selection of the connection, queues, release of sent memory, flow control and coalescing.
//
// Flow control. A peer has a window of request bytes that may wait at it. A request past the window waits for credit,
// which the peer reports with its frames; nested requests and those of event loops do not wait. Small requests do not
// wait for large ones that are being sent, because those do not wait at the peer yet. Replies always pass. The number
// of requests is limited too: the credit of one is its reply (core/overload.h).
//
// Coalescing. The link keeps small messages that follow each other at once and sends them together. Waiting threads,
// the leader and the timer thread flush them, so none stays in a buffer.
//
// Overtaking. While a link sends a large message in parts, small ones are sent between them, as far as the order rules
// allow (core/delivery_order.h). A large message defines no name for others and carries no credit, because it is
// delivered later than messages that follow it.
//
// The send_mutex of a connection guards its queues. It may be taken before the mutex of the engine, never after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/thread_safety.h"
#include "core/connection.h"
#include "core/take_if.h"
#include "core/tuning.h"
#include "core/work_queue.h"

namespace telegrad {

struct EngineParts;
struct Peer;

enum class SendResult {
  kDone,    // sent, or not to be sent any more
  kQueued,  // waits for a connection, or in the queue of one
  kBroken,  // this message is lost; frames that the peer sent before are still read
};

/// State of one message on its way to a link.
struct Transmission {
  bool copy = false;          // copy unsent bytes; else a message that waits for a connection gets a `pending_send`
  bool may_coalesce = false;  // it may be part of a burst, and may be coalesced
  const std::function<void()>* before_blocking = nullptr;
  // Limits of a message that has waited for a connection before: see `PendingMessage`.
  std::optional<Nanos> until;
  bool expired = false;
  ConnectionPtr connection;
  SendQueue* queue = nullptr;  // of the connection: the message is in it
  std::uint64_t ticket = 0;
  std::shared_ptr<PendingSend> pending_send;
  std::unique_ptr<KeepAlive> copied_owner;  // owner of memory that has been copied
};

/// Returns whether no thread waits for the message: it counts against the send queue.
inline bool is_kept(const Outgoing& m) { return m.immutable || m.segments.empty(); }

/// A message that waits for a connection.
struct PendingMessage {
  std::unique_ptr<Outgoing> message;
  // When its call stops waiting. Messages that the reference protocol counts on, and those without a call that stops
  // waiting, stay queued longer: until the peer is connected, known to be dead, or lost because it is silent.
  Nanos until;
  bool expired = false;      // no call waits: the peer is lost at `until`
  std::int64_t kept = 0;     // what it counts against the send queue,
  std::int64_t request = 0;  // and, if it is a large request, against the limit of requests without a reply
};

/// The messages to one peer that wait for a connection, in their order.
class PendingMessages {
 public:
  bool empty() const { return messages_.empty(); }
  std::size_t size() const { return messages_.size(); }
  /// Returns the bytes of those that no thread waits for.
  std::int64_t kept_bytes() const { return kept_bytes_; }
  /// Return the number and the bytes of those among them that were not admitted.
  std::size_t forced() const { return forced_; }
  std::int64_t forced_bytes() const { return forced_bytes_; }
  /// Returns the bytes of the large requests among them.
  std::int64_t request_bytes() const { return request_bytes_; }

  void add(PendingMessage&& m) {
    const std::int64_t size = weight(m.message->payload_size());
    if (is_kept(*m.message)) m.kept = size;
    if (m.message->header.type == FrameType::kRequest && RequestBytes::is_counted(size)) m.request = size;
    count(m, 1);
    messages_.push_back(std::move(m));
  }
  std::deque<PendingMessage> take() {
    return take_if([](const PendingMessage&) { return true; });
  }
  /// Takes those for which `is_taken` returns true (core/take_if.h).
  template <typename Predicate>
  std::deque<PendingMessage> take_if(Predicate is_taken) {
    auto taken = telegrad::take_if(messages_, is_taken);
    for (const PendingMessage& m : taken) count(m, -1);
    return taken;
  }

 private:
  void count(const PendingMessage& m, int by) {
    kept_bytes_ += by * m.kept;
    request_bytes_ += by * m.request;
    if (m.kept == 0 || m.message->admitted) return;
    forced_ += static_cast<std::size_t>(by);
    forced_bytes_ += by * m.kept;
  }

  std::deque<PendingMessage> messages_;
  std::int64_t kept_bytes_ = 0;
  std::int64_t forced_bytes_ = 0;
  std::int64_t request_bytes_ = 0;
  std::size_t forced_ = 0;
};

class Sender {
 public:
  /// `window`: request bytes that a peer may have waiting at this worker, and this worker at a peer.
  Sender(EngineParts& parts, std::int64_t window) : parts_(parts), window_(window) {}

  // ---- messages

  /// Sends on the peer's connection, or queues the message until there is one. `m` is empty if it was queued.
  SendResult route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Transmission& p) EXCLUDES(engine_mutex);
  /// Sends on a connection. kBroken means only that this message is lost. Frames that the peer sent before, above all
  /// its goodbye, are still read; then the leader finds the end of the link and completes its calls.
  SendResult transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p) EXCLUDES(engine_mutex);
  /// Sends a message that owns its memory.
  SendResult transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m) EXCLUDES(engine_mutex);
  /// Sends like `transmit`, by a caller that has the send_mutex.
  SendResult transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p)
      REQUIRES(c->send_mutex) EXCLUDES(engine_mutex);
  /// Sends messages that waited for the connection and notifies their senders.
  void send_pending(const ConnectionPtr& c, std::deque<PendingMessage>& pending) REQUIRES(c->send_mutex)
      EXCLUDES(engine_mutex);
  /// Sends queued messages after the link has become writable, because the peer has taken some.
  void on_writable(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  /// Sends queued messages.
  void flush(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  /// Has the leader call `on_writable`, unless the session is suspended. Any thread.
  void flush_by_leader(const ConnectionPtr& c) EXCLUDES(engine_mutex);

  /// Checks whether a message belongs to an ended session of the peer; `id` is 0 for a one-way message. Returns true if
  /// so: it is not sent, and its call has failed.
  bool reject_outdated(const Peer& peer, std::uint64_t id, const Outgoing& m, Released& released)
      REQUIRES(engine_mutex);  // inline, in peers.h
  /// Checks a message against the peer's limits; `id` is 0 for a one-way message. Returns true if it is over the limits
  /// and is not sent; its call has failed then. If the peer counts on its trailer, it is sent without its content, and
  /// the peer answers it.
  bool reject_oversized(const Connection& c, std::uint64_t id, Outgoing& m, Released& released) REQUIRES(engine_mutex);

  // ---- coalescing

  /// Flushes all coalesced messages.
  void flush_coalesced() EXCLUDES(engine_mutex);
  bool has_coalesced() const { return coalescing_since_.load(std::memory_order_relaxed) != kNever; }
  /// Returns when the first of these was coalesced, or kNever.
  Nanos coalescing_since() const { return coalescing_since_.load(std::memory_order_relaxed); }

  /// Returns whether a link has more of a message to send and could do so at once, since this was last called.
  bool exchange_can_continue() {
    return can_continue_.load(std::memory_order_relaxed) && can_continue_.exchange(false, std::memory_order_relaxed);
  }

  // ---- waiting

  /// Waits until the memory of a message has been sent. If the wait ends earlier, the unsent bytes are copied, as the
  /// message may still be sent.
  void wait_until_sent(std::int32_t peer, Transmission& p, Nanos deadline, const std::function<bool()>& interrupted)
      EXCLUDES(engine_mutex);
  /// Waits, on a thread of the pool, until a queued reply is sent. The thread does not count as running a request,
  /// because a peer that does not read its replies must not delay those of others.
  void wait_until_reply_sent(PoolThread& self, const Transmission& p) EXCLUDES(engine_mutex);

  // ---- flow control

  /// Returns whether a request of `size` bytes may be sent. Up to half the window any size may, so that large requests
  /// are never stuck. Requires the engine_mutex, except for a small request.
  bool window_open(const Connection& c, std::int64_t size) const {
    std::int64_t out = c.outstanding.load(std::memory_order_relaxed);
    if (size <= kLargePayload) {
      out -= c.large_unsent.load(std::memory_order_relaxed);
    } else if (!has_free_bytes(c, size)) {
      return false;
    }
    return has_room(out, size) && has_free_request(c);
  }
  /// Returns whether a request of `size` bytes may wait for a connection, after others.
  bool window_open(const PendingMessages& pending, std::int64_t size) const {
    return has_room(pending.kept_bytes(), size);
  }
  /// Returns whether the peer admits one more request without a reply.
  static bool has_free_request(const Connection& c) {
    return c.in_flight.load(std::memory_order_relaxed) < c.max_in_flight;
  }
  /// Returns whether the peer admits the bytes of one more request without a reply.
  static bool has_free_bytes(const Connection& c, std::int64_t size) {
    return !RequestBytes::is_counted(size) || c.in_flight_bytes.has_room(size, c.max_in_flight_bytes);
  }
  bool may_send_now(std::int32_t peer, std::uint64_t payload) const EXCLUDES(engine_mutex);
  /// Counts a request that is sent although the window is closed. Logs a warning once if these are many.
  void count_over_window(Connection& c, std::int32_t peer, std::int64_t size) EXCLUDES(engine_mutex);
  /// Holds further requests of a peer that has not read enough replies, after a reply of some bytes to it.
  void check_reply_window(const ConnectionPtr& c, std::int64_t reply) EXCLUDES(engine_mutex);
  /// Releases the requests of peers that have read enough.
  void release_held() REQUIRES(engine_mutex);
  /// Sends this worker's window before it waits for the peer. The peer's own window may be so large that it would not
  /// report such a small credit.
  void send_window(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  /// Counts a request as processed: its bytes no longer count against the sender.
  void return_credit(const ConnectionPtr& c, std::int64_t size) EXCLUDES(engine_mutex);
  /// Releases the mutex, as the thread begins `item`, and returns the credit for it. A request that does not run loses
  /// its content.
  void begin_item(Lock& lock, WorkItem& item) RELEASE(engine_mutex) NO_THREAD_SAFETY_ANALYSIS;

  std::uint64_t sent_messages() const { return sent_messages_.load(std::memory_order_relaxed); }

  void abandon_in_child() REQUIRES(engine_mutex);

 private:
  bool has_room(std::int64_t used, std::int64_t size) const { return used <= window_ / 2 || used + size <= window_; }
  void prepare(Connection& c, Outgoing& m) REQUIRES(c.send_mutex);
  static SendQueue& next_queue(Connection& c) REQUIRES(c.send_mutex);
  void enqueue(Connection& c, std::unique_ptr<Outgoing>&& m, Transmission& p) REQUIRES(c.send_mutex);
  static void note_front(Connection& c) REQUIRES(c.send_mutex);
  static std::unique_ptr<Outgoing> dequeue(Connection& c, SendQueue& queue) REQUIRES(c.send_mutex);
  void fail_outdated(std::uint64_t id, Released& released) REQUIRES(engine_mutex);
  static std::int64_t unread_replies(const Connection& c);
  bool coalesce(const ConnectionPtr& c, const Outgoing& m, bool more) REQUIRES(c->send_mutex) EXCLUDES(engine_mutex);
  void watch_writable(Connection& c, bool on) REQUIRES(c.send_mutex);
  bool wait_for_pending_send(std::int32_t peer, Transmission& p, Nanos deadline,
                             const std::function<bool()>& interrupted) EXCLUDES(engine_mutex);
  static void keep(Connection& c, Outgoing& m) REQUIRES(c.send_mutex);
  static void copy_queued(const Transmission& p);

  EngineParts& parts_;
  const std::int64_t window_;
  std::vector<ConnectionPtr> coalescing_ GUARDED_BY(engine_mutex);  // connections with coalesced messages
  std::atomic<Nanos> coalescing_since_ = kNever;
  std::atomic<bool> can_continue_ = false;  // a hint: without it, the leader spins before it sends more
  std::atomic<std::uint64_t> sent_messages_ = 0;
};

}  // namespace telegrad

// The engine: all native state of one worker.
//
// It moves messages between this worker and its peers, matches replies to calls, keeps deadlines, and schedules the
// threads of the worker. It has one thread of its own, the timer thread. Waiting threads do all I/O. This class is the
// facade; each part has its invariants in its own header:
//     Leader      which thread reads the links, and how the others sleep
//     WorkQueue   work items and the threads of the pool
//     CallTable   pending calls, completions and wait sets
//     Canceler    cancellation of requests of peers
//     Sender      queues, flow control, coalescing
//     Overload    limits of what the worker keeps at the same time
//     Peers       connections, handshakes, lanes, loss
//     Timer       when something is due
//
// Locks. One mutex guards the state of all parts; the send_mutex of a connection guards its sending. No thread blocks,
// frees memory of the layer above, or takes a lock of the layer above (the GIL) while it holds one of them. A
// send_mutex may be taken before the mutex, never after it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/fork_handlers.h"
#include "core/call_options.h"
#include "core/engine_parts.h"
#include "core/snapshot.h"

namespace telegrad {

struct EngineStats {
  std::size_t pending_calls = 0, queued_requests = 0, pool_threads = 0, running_handlers = 0, running_requests = 0,
              detached_requests = 0, connections = 0, lanes = 0;
  std::uint64_t requests = 0, replies = 0, sent_messages = 0, received_messages = 0;
  BufferPoolStats memory;
  std::size_t multicast_buffers = 0;  // multicast buffers in use by a message or a receiver
};

/// Leased memory for a segment of a message.
struct BufferLease {
  std::uint64_t connection;  // the only connection that can pass the memory on without a copy
  std::uint64_t lease;       // value for OutSegment::lease
  BlockPtr memory;           // see `Link::lease`
};

class Engine final : public ForkHandler {
 public:
  explicit Engine(Settings settings);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- peers. Any thread, never blocks.

  /// Opens a listener and returns the address for peers. Throws std::system_error.
  std::string listen(const std::string& address) { return parts_.peers.listen(address); }
  void set_peer(PeerAddress peer) { parts_.peers.set_peer(std::move(peer)); }
  /// Closes all connections to the peer. Its calls fail with kPeerLost, and a peer event is queued. Does nothing to a
  /// newer incarnation than the given one.
  void remove_peer(std::int32_t id, const std::string& why, std::uint64_t incarnation = kAnyIncarnation) {
    parts_.peers.remove_peer(id, why, incarnation);
  }
  /// Closes all connections to the peer after a goodbye. Its calls fail with kPeerLost; no peer event is queued. The id
  /// may be given to another worker afterwards. Does nothing to a newer incarnation than the given one.
  void disconnect(std::int32_t id, const std::string& why, std::uint64_t incarnation = kAnyIncarnation) {
    parts_.peers.disconnect(id, why, incarnation);
  }

  /// Reports that an event of a session with the peer (kPeerLost, kPeerLeft, kPeerBack) has been processed. The next
  /// session with the peer opens after all of them.
  void acknowledge(std::int32_t peer) { parts_.peers.acknowledge(peer); }
  /// Sets the epoch of messages to the peer that may still be sent, see `Outgoing::epoch`.
  void set_epoch(std::int32_t peer, std::int64_t epoch) { parts_.peers.set_epoch(peer, epoch); }
  std::int64_t epoch_of(std::int32_t peer) const { return parts_.peers.epoch_of(peer); }
  /// Returns whether a connection is open: the session has not ended.
  bool is_open(std::uint64_t connection) const { return parts_.peers.is_open(connection); }

  // ---- messages that may be sent again. Any thread.

  /// Return whether messages on a connection, or to a peer, are kept until they have arrived (Outgoing::verifiable).
  /// The second one is a guess if there is no connection. Never block.
  bool is_resumable(std::uint64_t connection) const { return parts_.peers.is_resumable(connection); }
  bool may_be_resumable(std::int32_t peer) const { return parts_.peers.may_be_resumable(peer); }
  /// Processes a work item of kVerify. Blocks for copies of large messages, and as long as `KeepAlive::is_unchanged`
  /// does.
  void verify(const WorkItem& item) { parts_.peers.verify(item.connection); }

  // ---- calls. Any thread.

  /// Opens a call and sends its request. May block, at most until the deadline, for the peer's window and until the
  /// request's segments have been sent. Never fails: an error becomes the completion of the call. If the request has
  /// been sent on return, `request` still holds it, and the caller releases its memory.
  std::uint64_t start(std::int32_t peer, std::unique_ptr<Outgoing>&& request, CallOptions options);
  /// Returns whether the peer's window admits a request of this size now. Never blocks.
  bool may_send_now(std::int32_t peer, std::uint64_t payload) const {
    return parts_.sender.may_send_now(peer, payload);
  }
  /// Waits for the completion of a call. kDone: `out` holds the completion and the call is closed. kStopped: the call
  /// does not exist, because its completion went to the pool. kDeadline and kInterrupted leave the call open until
  /// `give_up`; if it completes meanwhile, the next `wait` or `give_up` finds the completion.
  WaitEnd wait(std::uint64_t call, Nanos deadline, const std::function<bool()>& interrupted, Completion& out) {
    return parts_.calls.wait(call, deadline, interrupted, out);
  }
  /// Ends a call whose deadline has passed: notifies the callee and waits up to kStateGrace for the state of the
  /// request there. kDone: `out` is the completion, and its reason names the state. kInterrupted leaves the call open.
  WaitEnd expire(std::uint64_t call, const std::function<bool()>& interrupted, Completion& out) {
    return parts_.calls.expire(call, interrupted, out);
  }
  /// Ends a pending call soon, as if its deadline had just passed. Never blocks. Any thread.
  void expire_soon(std::uint64_t call) { parts_.calls.expire_soon(call); }
  /// Abandons a call and cancels its request. Its late reply is dropped. May block while another thread sends to the
  /// same peer.
  void give_up(std::uint64_t call) { parts_.calls.give_up(call); }
  /// Cancels a pending call: completes it with kCanceled, and its request is not sent, or canceled at the callee. If no
  /// thread waits for the call, `taken` gets its completion with its target. Returns false if the call has completed or
  /// its deadline has passed. May block while another thread sends to the same peer; calls `before_blocking` before.
  bool cancel(std::uint64_t call, WorkItem& taken, const std::function<void()>& before_blocking = {}) {
    return parts_.calls.cancel(call, taken, before_blocking);
  }
  /// Adds the calls of `set` to a wait set: their completions go to it instead of the pool. Calls with a completion
  /// that the pool or a waiting thread has taken are listed in `set.taken_elsewhere`. Returns false, without any
  /// change, if another thread waits for one of the calls. Never blocks.
  bool add_wait_set(WaitSet& set) { return parts_.calls.add_wait_set(set); }
  /// Waits until a completion of the set has arrived and appends it to `out`, until none is left, or until
  /// `notify_wait_sets` is called. kStopped: no completion will arrive any more.
  WaitEnd wait(WaitSet& set, const std::function<bool()>& interrupted, std::deque<WorkItem>& out) {
    return parts_.calls.wait(set, interrupted, out);
  }
  /// Wakes all wait sets, because the pool or a waiting thread has processed a completion. Never blocks.
  void notify_wait_sets() { parts_.calls.notify_wait_sets(); }
  /// Dissolves a wait set: the pool gets the remaining completions and those in `left`. If the engine has stopped and
  /// the pool has no threads, `left` returns all of them. Never blocks.
  void remove_wait_set(WaitSet& set, std::deque<WorkItem>& left) { parts_.calls.remove_wait_set(set, left); }
  /// Removes a completion that is queued for the pool; false if the pool has taken it or will. For use after `stop`,
  /// when the pool may have no threads. Never blocks.
  bool remove_completion(std::uint64_t call) { return parts_.queue.remove_completion(call); }
  /// Takes a deferred completion if one is queued, which saves the pool the work. Never blocks.
  bool take_deferred(WorkItem& out) { return parts_.queue.take_deferred(out); }
  /// Returns whether a deferred completion may be queued. A hint, read without the lock.
  bool has_deferred() const { return parts_.queue.has_deferred(); }
  /// Sends a reply on the connection of its request. Returns false if that has closed: the reply is not sent. If
  /// `may_wait` is set, a thread of the pool blocks until the reply is sent, as long as the peer reads. Other threads
  /// never block, and unsent bytes are copied. If the reply has been sent on return, `reply` still holds it.
  bool reply(std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing>&& reply, bool may_wait,
             const std::function<void()>& before_blocking = {});
  /// Returns the size limit for the body of a reply on a connection. Never blocks.
  std::uint64_t largest_body(std::uint64_t connection) const;
  /// Sends a one-way message. Never blocks: unsent bytes are copied. Returns false if the peer is known to be
  /// unreachable.
  bool send(std::int32_t peer, std::unique_ptr<Outgoing> message);

  // ---- requests of peers. Any thread, never blocks.

  /// Records that a request has no thread, because it waits for its inputs.
  void park(const WorkItem& request) { parts_.canceler.park(request); }
  /// Records that a request has no thread: its result is deferred, or (not `deferred`) it waits for its inputs. Returns
  /// whether it has been canceled. A canceled request with a deferred result is reported once as a kCancel work item.
  bool detach(std::uint64_t connection, std::uint64_t call, bool deferred) {
    return parts_.canceler.detach(connection, call, deferred);
  }
  /// Returns the number of requests that wait for their inputs.
  std::size_t parked() const {
    Lock lock(parts_.mutex);
    return parts_.canceler.parked();
  }
  /// Returns whether a request has been canceled; false once it has been answered.
  bool is_canceled(std::uint64_t connection, std::uint64_t call) const {
    return parts_.canceler.is_canceled(connection, call);
  }
  /// Records that the handler of a request has seen that its deadline has passed: the call times out.
  void mark_late(std::uint64_t connection, std::uint64_t call) { parts_.canceler.mark_late(connection, call); }

  // ---- memory. Any thread, never blocks.

  /// Leases `size` bytes for a message to a peer: from the given connection if that is the peer's (-1: any peer), else
  /// from the connection that requests use. Returns nothing if the link leases no memory.
  std::optional<BufferLease> lease(std::int32_t peer, std::uint64_t connection, std::size_t size);
  /// Allocates `size` bytes for a message to all of these peers (OutSegment::multicast), and announces the buffer to
  /// those on this host. Returns null if there is none.
  std::shared_ptr<MulticastBuffer> allocate_multicast(std::span<const std::int32_t> peers, std::size_t size);

  // ---- the thread pool

  /// Waits for the next work item. Returns false when the engine stops. Blocks; a thread of the pool only.
  bool next(PoolThread& self, WorkItem& out) { return parts_.leader.next(self, out); }
  /// Returns the next work item if one is queued; otherwise returns false and changes nothing. Never blocks.
  bool try_next(PoolThread& self, WorkItem& out);

  /// Reports that the thread which an item requested with `needs_thread` could not be started. A later item requests it
  /// again.
  void spawn_failed() { parts_.queue.spawn_failed(); }

  /// Requests one kCallback event in the pool after `delay`; calls until then are merged. Takes no lock and never
  /// blocks, so a finalizer may call it at any time.
  void request_callback(Nanos delay) { parts_.leader.request_callback(delay); }

  // ---- life

  /// Sends a goodbye to all peers, waits up to `timeout` for queued bytes to be sent, fails every call, and ends the
  /// threads of the pool. Blocks for at most `timeout`. May be called more than once.
  void stop(Nanos timeout);
  bool stopping() const { return parts_.is_stopping(); }
  EngineStats stats() const;
  /// Returns what this worker is doing. Copies under the mutex: for a worker that hangs, not for each call. `on_target`
  /// gets the targets of asynchronous calls, under the mutex.
  Snapshot snapshot(const std::function<void(std::uint64_t call, const KeepAlive& target)>& on_target);
  /// Returns a request that a thread of the pool runs, or that is detached. Never blocks. Any thread.
  std::optional<RequestSnapshot> find_request(std::uint64_t connection, std::uint64_t call);
  const std::shared_ptr<BufferPool>& buffers() const { return parts_.buffers; }
  std::int32_t id() const { return parts_.settings.handshake.me.id; }

  /// The child closes every descriptor without sending anything, and its engine is stopped.
  void before_fork() override NO_THREAD_SAFETY_ANALYSIS;
  void after_fork_in_parent() override NO_THREAD_SAFETY_ANALYSIS;
  void after_fork_in_child() override NO_THREAD_SAFETY_ANALYSIS;

 private:
  /// How the request of a call is sent.
  struct Route {
    std::uint64_t id = 0;
    std::int64_t size = 0;  // what it counts against the window
    ConnectionPtr connection;
    bool straight = false;  // on this connection, without a further search for the peer
  };
  bool admit(std::int32_t peer, Outgoing& m, CallOptions& o, Nanos at, Route& route, Released& released)
      EXCLUDES(engine_mutex);
  void await_window(std::int32_t peer, Outgoing& m, const CallOptions& o, const Route& route, Released& released)
      EXCLUDES(engine_mutex);
  bool wait_for_room(std::uint64_t id, std::int32_t peer, std::int64_t size, const CallOptions& o)
      EXCLUDES(engine_mutex);
  void ensure_completion(std::uint64_t id, const CallOptions& o);
  void on_timer(Lock& lock) NO_THREAD_SAFETY_ANALYSIS;
  bool trim_is_due(Nanos at) REQUIRES(engine_mutex);

  EngineParts parts_;
  bool stop_begun_ GUARDED_BY(engine_mutex) = false;
  Nanos trim_at_ GUARDED_BY(engine_mutex) = 0;
};

}  // namespace telegrad

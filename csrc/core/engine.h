// The engine: all native state of one worker.
//
// It moves messages between this worker and its peers, matches replies to calls, keeps deadlines, and schedules the
// threads of the worker. It has one thread of its own, the timer thread. Waiting threads do all I/O.
//
// Leader. At most one thread at a time reads from the links: the leader. A thread that waits for a reply becomes the
// leader if there is none, so that the reply reaches it without a thread switch; otherwise it sleeps on its parker.
// Threads of the pool (inside `next`) become the leader if no caller is. They spin for a moment and then park: one of
// them sleeps in epoll on `park_epoll_`, which contains `links_epoll_`, which contains every link. A caller that
// replaces a parked leader disables `links_epoll_` in `park_epoll_`, so that data for the caller does not wake the
// parked thread. The timer thread enables it again ("watching") if no thread has polled for kHandoffDelay. A caller
// replaces a spinning leader between two of its polls (core/leader_handoff.h), because the caller must not sleep while
// another thread polls on its behalf.
//
// A thread that waits inside user code never runs a request: it queues the requests that it reads and wakes a thread of
// the pool. A thread of the pool runs the request that it reads. If it returns within kHandoffDelay, no other thread is
// woken.
//
// Busy polling. The leader reads memory-mapped links that were active lately without a system call, and their peers
// need not wake it. Before the leader sleeps, or the parked thread watches, the wake-up of these links is enabled
// again.
//
// Coalescing. The link keeps small messages that follow each other at once and sends them together (`coalesce`).
// Waiting threads, the leader and the timer thread flush them, so none stays in a buffer.
//
// Locks. mutex_ guards the scheduler, calls, peers and queues; the send_mutex of a connection guards its sending. No
// thread blocks, frees memory of the layer above, or takes a lock of the layer above (the GIL) while it holds one of
// them. send_mutex may be taken before mutex_, never after it.
#pragma once

#include <array>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fork_handlers.h"
#include "base/peer_credentials.h"
#include "base/unique_fd.h"
#include "core/calls.h"
#include "core/connection.h"
#include "core/handshake.h"
#include "core/leader_handoff.h"
#include "core/spin.h"
#include "core/transport.h"
#include "core/work_item.h"
#include "memory/buffer_pool.h"
#include "memory/multicast_arena.h"

namespace telegrad {

/// Longest time that links may go unread, or work unstarted, before another thread is woken.
inline constexpr Nanos kHandoffDelay = 500 * kMicrosecond;
/// The same if the last handlers returned before that time ended.
inline constexpr Nanos kMaxHandoffDelay = 4 * kHandoffDelay;
/// Delay of the timer thread after the leader's own check of the clock. A thread that wakes while two others spin takes
/// a core from one of them.
inline constexpr Nanos kTimerSlack = 200 * kMicrosecond;
/// Cached memory that was not used for this time is released.
inline constexpr Nanos kTrimInterval = 10 * kSecond;
/// Longest time that a coalesced message is kept back.
inline constexpr Nanos kCoalesceDelay = 50 * kMicrosecond;
/// Longest time that completions stay queued while a thread runs others.
inline constexpr Nanos kCompletionDelay = 20 * kMillisecond;
/// Longest time that deferred completions stay queued.
inline constexpr Nanos kDeferDelay = 4 * kHandoffDelay;

struct Settings {
  HandshakeConfig handshake;
  Nanos spin = 50 * kMicrosecond;  // how long a waiting thread polls before it sleeps
  std::size_t handlers = 16;       // top-level requests that run at the same time
  std::int64_t window = 64 << 20;  // request bytes that a peer may have waiting at this worker
  std::size_t pool_cache = std::size_t{1} << 30;
  Nanos handshake_timeout = 10 * kSecond;
  Nanos connect_timeout = 30 * kSecond;  // how long a call may wait for a connection; 0: without limit
  bool check_uid = true;                 // reject peers on this host that run as another user
};

struct PeerAddress {
  Identity identity;
  std::vector<std::string> addresses;  // in the order to try them
};

/// A thread of the pool, from its first call of `next` to its last.
struct PoolThread {
  ~PoolThread();

  Parker parker;
  bool idle = false;
  bool known = false;
  bool top_level = false;  // runs a request that counts against Settings::handlers
  bool running = false;
  WorkKind kind{};               // kind of the work item that it runs
  bool runs_peer_event = false;  // it runs a peer event
  Spin spin{0};
  const void* engine = nullptr;  // the engine of its pool
};

struct EngineStats {
  std::size_t pending_calls = 0, queued_requests = 0, pool_threads = 0, running_handlers = 0, running_requests = 0,
              connections = 0, lanes = 0;
  std::uint64_t requests = 0, replies = 0, sent_messages = 0, received_messages = 0;
  BufferPoolStats memory;
  std::size_t multicast_buffers = 0;  // multicast buffers in use by a message or a receiver
};

inline constexpr const char* kForked = "this process is a fork of its worker's, which cannot use its calls";

/// Leased memory for a segment of a message.
struct BufferLease {
  std::uint64_t connection;  // the only connection that can pass the memory on without a copy
  std::uint64_t lease;       // value for OutSegment::lease
  BlockPtr memory;           // see `Link::lease`
};

enum class WaitEnd : std::uint8_t { kDone, kDeadline, kInterrupted, kStopped };

/// Options of `Engine::start`.
struct CallOptions {
  Nanos deadline = kNever;
  bool nested = false;      // made inside a handler: exempt from the window, and always finds a thread
  bool background = false;  // no thread waits for the completion: links may go unread for it for kMaxHandoffDelay, and
                            // a request that must be sent waits for a connection without limit
  bool deferrable = false;  // background, and the completion runs no user code: it may stay queued for kDeferDelay, and
                            // `take_deferred` may return it
  bool never_wait = false;  // wait neither for the window nor for the socket: unsent bytes are copied
  std::function<bool()> interrupted;      // polled while `start` waits; true ends the wait
  std::function<void()> before_blocking;  // called before `start` waits for another thread that sends to the same peer
  std::unique_ptr<KeepAlive> target;      // if set, the completion goes to the pool unless a thread waits for it
  std::unique_ptr<KeepAlive> keep_alive;  // kept until the reply has arrived, even a late one, or the peer is lost
};

class Engine final : public ForkHandler {
 public:
  explicit Engine(Settings settings);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- peers (engine_peers.cc). Any thread, never blocks.

  /// Opens a listener and returns the address for peers. Throws std::system_error.
  std::string listen(const std::string& address);
  void set_peer(PeerAddress peer);
  /// Closes all connections to the peer. Its calls fail with kPeerLost, and a peer event is queued.
  void remove_peer(std::int32_t id, const std::string& why);
  /// Closes all connections to the peer after a goodbye. Its calls fail with kPeerLost; no peer event is queued. The id
  /// may be given to another worker afterwards.
  void disconnect(std::int32_t id, const std::string& why);

  // ---- calls (engine_calls.cc). Any thread.

  /// Opens a call and sends its request. May block, at most until the deadline, for the peer's window and until the
  /// request's segments have been sent. Never fails: an error becomes the completion of the call. If the request has
  /// been sent on return, `request` still holds it, and the caller releases its memory.
  std::uint64_t start(std::int32_t peer, std::unique_ptr<Outgoing>&& request, CallOptions options);
  /// Returns whether the peer's window admits a request of this size now. Never blocks.
  bool may_send_now(std::int32_t peer, std::uint64_t payload) const;
  /// Waits for the completion of a call. kDone: `out` holds the completion and the call is closed. kStopped: the call
  /// does not exist, because its completion went to the pool. kDeadline and kInterrupted leave the call open until
  /// `give_up`; if it completes meanwhile, the next `wait` or `give_up` finds the completion.
  WaitEnd wait(std::uint64_t call, Nanos deadline, const std::function<bool()>& interrupted, Completion& out);
  /// Abandons a call. Its late reply is dropped. Never blocks.
  void give_up(std::uint64_t call);
  /// Adds the calls of `c` to a wait set: their completions go to `c` instead of the pool. Calls with a completion
  /// that the pool or a waiting thread has taken are listed in `c.elsewhere`. Returns false, without any change, if
  /// another thread waits for one of the calls. Never blocks.
  bool add_wait_set(WaitSet& c);
  /// Waits until a completion of the set has arrived and appends it to `out`, until none is left, or until
  /// `notify_wait_sets` is called. kStopped: no completion will arrive any more.
  WaitEnd wait(WaitSet& c, const std::function<bool()>& interrupted, std::deque<WorkItem>& out);
  /// Wakes all wait sets, because the pool or a waiting thread has processed a completion. Never blocks.
  void notify_wait_sets();
  /// Dissolves a wait set: the pool gets the remaining completions and those in `left`. If the engine has stopped and
  /// the pool has no threads, `left` returns all of them. Never blocks.
  void remove_wait_set(WaitSet& c, std::deque<WorkItem>& left);
  /// Removes a completion that is queued for the pool; false if the pool has taken it or will. For use after `stop`,
  /// when the pool may have no threads. Never blocks.
  bool remove_completion(std::uint64_t call);
  /// Takes a deferred completion if one is queued, which saves the pool the work. Never blocks.
  bool take_deferred(WorkItem& out);
  /// Returns whether a deferred completion may be queued. A hint, read without the lock.
  bool has_deferred() const { return has_deferred_.load(std::memory_order_relaxed); }
  /// Sends a reply on the connection of its request; drops the reply if the connection has closed. If `may_wait` is
  /// set, a thread of the pool blocks until the reply is sent, as long as the peer reads. Other threads never block,
  /// and unsent bytes are copied. If the reply has been sent on return, `reply` still holds it.
  void reply(std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing>&& reply, bool may_wait,
             const std::function<void()>& before_blocking = {});
  /// Returns the size limit for the body of a reply on a connection. Never blocks.
  std::uint64_t largest_body(std::uint64_t connection) const;
  /// Sends a one-way message. Never blocks: unsent bytes are copied. Returns false if the peer is known to be
  /// unreachable.
  bool send(std::int32_t peer, std::unique_ptr<Outgoing> message);

  // ---- memory (engine_memory.cc). Any thread, never blocks.

  /// Leases `size` bytes for a message to a peer: from the given connection if that is the peer's (-1: any peer), else
  /// from the connection that requests use. Returns nothing if the link leases no memory.
  std::optional<BufferLease> lease(std::int32_t peer, std::uint64_t connection, std::size_t size);
  /// Allocates `size` bytes for a message to all of these peers (OutSegment::common), and announces the buffer to those
  /// on this host. Returns null if there is none.
  std::shared_ptr<MulticastBuffer> allocate_multicast(std::span<const std::int32_t> peers, std::size_t size);

  // ---- the pool (engine_wait.cc)

  /// Waits for the next work item. Returns false when the engine stops. Blocks; a thread of the pool only.
  bool next(PoolThread& self, WorkItem& out);
  /// Returns the next work item if one is queued; otherwise returns false and changes nothing. Never blocks.
  bool try_next(PoolThread& self, WorkItem& out);

  /// Reports that the thread which an item requested with `needs_thread` could not be started. A later item requests it
  /// again.
  void spawn_failed();

  /// Requests one kCallback event in the pool after `delay`; calls until then are merged. Takes no lock and never
  /// blocks, so a finalizer may call it at any time.
  void request_callback(Nanos delay);

  // ---- life

  /// Sends a goodbye to all peers, waits up to `keep_alive` for queued bytes to be sent, fails every call, and ends the
  /// threads of the pool. Blocks for at most `keep_alive`. May be called more than once.
  void stop(Nanos keep_alive);
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  EngineStats stats() const;
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  std::int32_t id() const { return settings_.handshake.me.id; }

  /// The child closes every descriptor without sending anything, and its engine is stopped.
  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  struct Peer {
    Identity identity;
    std::vector<std::string> addresses;
    std::size_t next_address = 0;
    bool connecting = false;
    bool slow = false;      // an address tried in this round may still succeed
    Nanos retry_after = 0;  // pause before the next round
    Nanos retry_at = kNever;
    bool removed = false;
    bool was_lost = false;
    std::string last_error;
    ConnectionPtr link;  // carries the requests
    struct PendingMessage {
      std::unique_ptr<Outgoing> message;
      Nanos until;  // when its call stops waiting. Messages that the reference protocol counts on stay queued longer,
                    // until the peer is connected or known to be dead
    };
    std::deque<PendingMessage> pending;  // messages that wait for a connection
  };
  using Released = std::vector<std::unique_ptr<KeepAlive>>;
  using Lock = std::unique_lock<std::mutex>;

  // engine_accept.cc
  void accept_from(Listener& listener);
  ConnectionPtr connection_to_displace(const std::string& source, std::size_t places) const;
  PeerCredentials peer_credentials_of(const Link& link);
  static std::optional<std::string> rejection_reason(const PeerCredentials& user);
  void log_rejected(const Link& link, const std::string& source, const std::string& why, bool displaced = false);

  // engine_peers.cc
  ConnectionPtr add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator);
  void connect(Lock& lock, Peer& peer);
  void unreachable(Peer& peer, const std::string& why, Released& released);
  void fail_pending(Peer::PendingMessage&& pending, const std::string& why, Released& released);
  void expire_pending(Peer& peer, Nanos at, Released& released);
  void on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body);
  void on_open(const ConnectionPtr& c);
  void close_connection(const ConnectionPtr& c, std::string why);
  void log(std::string text);
  void expire_handshakes(Lock& lock, Nanos at);
  void arm_handshake_timer(Nanos at);

  // engine_lanes.cc
  void open_lanes(const ConnectionPtr& c);
  void open_lane(const ConnectionPtr& c);
  void attach_lane(const ConnectionPtr& lane);
  static std::unique_ptr<Outgoing> frame(const Handshake::Step& step);

  // engine_send.cc
  enum class SendResult { kDone, kQueued, kBroken };
  struct Transmission {         // state of one message on its way to a link
    bool copy = false;          // copy unsent bytes; else a message that waits for a connection gets a `pending_send`
    bool may_coalesce = false;  // it may be part of a burst, and may be coalesced
    const std::function<void()>* before_blocking = nullptr;
    ConnectionPtr connection;
    std::uint64_t ticket = 0;
    std::shared_ptr<PendingSend> pending_send;
    std::unique_ptr<KeepAlive> copied_owner;  // owner of memory that has been copied
  };
  SendResult transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p);
  SendResult transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m);
  SendResult transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Transmission& p);
  SendResult route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Transmission& p);
  void send_pending(const ConnectionPtr& c, std::deque<Peer::PendingMessage>& pending);
  void flush(const ConnectionPtr& c);
  bool coalesce(const ConnectionPtr& c, const Outgoing& m, bool more);
  void flush_coalesced();
  void watch_writable(Connection& c, bool on);
  bool window_open(const Connection& c, std::int64_t size) const;
  void count_over_window(Connection& c, std::int32_t peer, std::int64_t size);
  void send_window(const ConnectionPtr& c);
  void return_credit(const ConnectionPtr& c, std::int64_t size);
  void wait_until_sent(std::int32_t peer, Transmission& p, Nanos deadline, const std::function<bool()>& interrupted);
  bool wait_for_pending_send(std::int32_t peer, Transmission& p, Nanos deadline,
                             const std::function<bool()>& interrupted);
  void wait_until_reply_sent(PoolThread& self, const Transmission& p);
  void copy_queued(const ConnectionPtr& c, std::uint64_t ticket);

  // engine_calls.cc
  void complete(std::uint64_t id, Completion&& completion, Released& released);
  void orphan(std::int32_t peer, Incoming&& m);
  void close_call(std::uint64_t id, bool replied, Released& released);
  bool take_queued(std::uint64_t id, Completion& out, Released& released);
  void release_keep_alive(std::uint64_t id, Released& released);
  bool reject_oversized(const Connection& c, std::uint64_t id, Outgoing& m, Released& released);
  void on_message(const ConnectionPtr& c, Incoming&& m);
  void process_replies(const ConnectionPtr& c);
  void on_reply(const ConnectionPtr& c, Incoming&& m, Released& released);
  void expire_calls(Nanos at, Released& released);

  // engine_wait.cc
  enum class For { kReply, kCompletions, kProgress };
  WaitEnd wait_for(For what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                   const std::function<bool()>& interrupted, std::uint64_t connection = 0);
  bool poll(Spin& spin, Nanos until, bool may_block, LeaderHandoff::Term term = LeaderHandoff::kCallerTerm);
  bool poll_fds(int timeout_ms);
  bool poll_memory();
  void mark_closed(Connection& c);
  std::vector<ConnectionPtr> reap_closed();
  bool poll_once(std::uint32_t turn);
  bool arm_wakeups();
  bool read_from(const ConnectionPtr& c);
  void become_leader();
  void resign(bool to_user_code);
  void watch_links();
  void enable_busy_poll_for(std::uint64_t connection);
  void enable_busy_poll(const ConnectionPtr& c);
  void set_links_watched(bool enabled);
  void wake_for_work();
  bool pop(PoolThread& self, WorkItem& out);
  void park(Lock& lock, PoolThread& self);
  bool sleep_idle(Lock& lock, PoolThread& self);
  PoolThread* this_thread() const;
  void enter_pool(PoolThread& self);
  void begin_item(Lock& lock, const WorkItem& item);
  void push(WorkItem&& item);
  void flush_deferred();
  void queue_peer_event(WorkItem&& event);
  void finish_peer_event();
  bool has_work() const;
  bool has_requests() const;
  bool has_urgent() const;
  bool is_running_completions() const;
  void arm_timer(Nanos at);
  void run_timer();
  void on_timer(Lock& lock);
  void on_timer_if_due(Nanos at);
  void interrupt_poll();
  void notify_parked();
  void notify_progress();

  const Settings settings_;
  const std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<MulticastArena> multicast_arena_;
  mutable std::mutex mutex_;

  // Descriptors.
  static constexpr std::uint64_t kInterruptToken = 1, kLinksToken = 2, kParkToken = 3, kCallbackToken = 4,
                                 kFirstToken = 16;
  static constexpr std::uint64_t kLanesBit = std::uint64_t{1} << 63;  // or-ed to a link's token: its `lanes_fd`
  UniqueFd links_epoll_, park_epoll_, interrupt_fd_, park_fd_, timer_fd_, callback_fd_;
  std::atomic<bool> callback_requested_ = false;
  std::uint64_t next_token_ = kFirstToken;  // links and listeners
  std::unordered_map<std::uint64_t, ConnectionPtr> connections_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Listener>> listeners_;
  std::vector<ConnectionPtr> new_lane_links_;  // links with a new lane, not polled yet; leader only
  CredentialLookup users_;                     // leader only
  std::unique_ptr<Link> accepting_;            // accepted; the user of its peer is being looked up
  Nanos rejected_since_ = 0;  // start of the interval in which `rejected_` rejected connections were logged
  std::size_t rejected_ = 0;
  Nanos displaced_logged_at_ = -3600 * kSecond;  // when displaced connections were last logged
  Nanos handshake_timer_at_ = kNever;            // when a handshake expires or a reconnect is due

  std::map<std::int32_t, Peer> peers_;
  CallTable calls_;
  std::vector<WaitSet*> wait_sets_;
  struct KeptAlive {
    std::uint64_t connection;
    std::unique_ptr<KeepAlive> owner;
  };
  std::unordered_map<std::uint64_t, KeptAlive> keep_alives_;  // by id of a call that ended without its reply
  std::vector<ConnectionPtr> coalescing_;                     // connections with coalesced messages
  std::atomic<Nanos> coalescing_since_ = kNever;              // when the first of these was coalesced

  // Work for the pool.
  std::deque<WorkItem> urgent_;             // completions, one-way messages, events
  std::deque<WorkItem> deferred_;           // deferred completions: run when no other work is queued, or after a while
  std::atomic<bool> has_deferred_ = false;  // hint, read without the mutex
  bool peer_event_running_ = false;         // a peer event is in `urgent_` or running
  std::deque<WorkItem> peer_events_;  // later peer events, so that the loss of a peer is handled before its return
  std::deque<WorkItem> nested_;
  std::deque<WorkItem> top_;
  std::size_t running_top_ = 0, running_ = 0, running_requests_ = 0, running_completions_ = 0, threads_ = 0;
  bool thread_starting_ = false;
  const std::size_t spin_limit_;  // while this number of pool threads run items, the others do not spin

  // The scheduler.
  std::atomic<bool> has_leader_ = false;  // there is a leader; written under the mutex
  LeaderHandoff handoff_;                 // lets a caller replace a spinning leader of the pool
  bool links_watched_ = false;            // links_epoll_ is enabled in park_epoll_
  PoolThread* parked_ = nullptr;          // sleeps on park_epoll_
  std::vector<PoolThread*> idle_;         // asleep on their parkers; most recent last
  std::list<Waiter*> sleeping_callers_;   // callers asleep
  std::list<Waiter*> progress_;           // those that wait for credit or for bytes to be sent
  Nanos released_at_ = 0;
  Nanos handoff_delay_ = kHandoffDelay;   // how long links may then go unread; longer if a thread polled in time
  Nanos popped_at_ = 0;                   // when a pool thread last took an item
  Nanos completion_taken_at_ = 0;         // when a pool thread last took a completion
  std::atomic<Nanos> timer_at_ = kNever;  // written with the mutex held
  Nanos trim_at_ = 0;
  Spin caller_spin_;  // of the leading caller
  bool stop_begun_ = false, stopped_ = false, timer_stopped_ = false, forked_ = false;
  std::atomic<int> progress_waiters_ = 0;

  // Owned by the leader; under the mutex, by any thread while there is no leader.
  ConnectionPtr last_active_;
  std::vector<ConnectionPtr> busy_polled_;  // busy-polled connections, see Link::enable_busy_poll
  std::atomic<bool> has_closed_ = false;    // a connection has closed that the leader may reference
  std::uint32_t memory_polls_ = 0;
  std::uint64_t arrivals_ = 0;
  std::vector<Incoming> unprocessed_replies_;  // replies of the current link that have been read but not processed

  std::atomic<std::uint64_t> sent_messages_ = 0, received_messages_ = 0;
  std::uint64_t requests_ = 0, replies_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread timer_thread_;
};

}  // namespace telegrad

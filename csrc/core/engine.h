// The engine: all native state of one worker.
//
// It moves messages between this worker and its peers, matches replies to calls, keeps deadlines, and schedules the
// threads of the worker. It has one thread of its own, the timer thread. Waiting threads do all I/O.
//
// Leader. At most one thread at a time reads from the links: the leader. A thread that waits for a reply becomes the
// leader if there is none, so that the reply reaches it without a thread switch; otherwise it sleeps on its parker.
// Threads of the pool (inside `next`) become the leader if no caller is. They spin for a moment and then park: one of
// them sleeps in epoll on `outer_`, which contains `inner_`, which contains every link. A caller that replaces a parked
// leader disables `inner_` in `outer_`, so that data for the caller does not wake the parked thread. The timer thread
// enables it again ("watching") if no thread has polled for kGrace. A caller replaces a spinning leader between two of
// its polls (core/gate.h), because the caller must not sleep while another thread polls on its behalf.
//
// A thread that waits inside user code never runs a request: it queues the requests that it reads and wakes a thread of
// the pool. A thread of the pool runs the request that it reads. If it returns within kGrace, no other thread is woken.
//
// Busy polling. The leader reads memory-mapped links that were active lately without a system call, and their peers
// need not wake it. Before the leader sleeps, or the parked thread watches, the wake-up of these links is enabled
// again.
//
// Coalescing. The link keeps small messages that follow each other at once and sends them together (`gather`). Waiting
// threads, the leader and the timer thread flush them, so none stays in a buffer.
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

#include "core/calls.h"
#include "core/connection.h"
#include "core/gate.h"
#include "core/handshake.h"
#include "core/item.h"
#include "core/pool.h"
#include "core/spin.h"
#include "core/transport.h"
#include "transports/commons.h"
#include "transports/descriptor.h"
#include "transports/peer_user.h"

namespace telegrad {

/// Longest time that links may go unread, or work unstarted, before another thread is woken.
inline constexpr Nanos kGrace = 500 * kMicrosecond;
/// The same if the last handlers returned before that time ended.
inline constexpr Nanos kMostGrace = 4 * kGrace;
/// Delay of the timer thread after the leader's own check of the clock. A thread that wakes while two others spin takes
/// a core from one of them.
inline constexpr Nanos kTimerSlack = 200 * kMicrosecond;
/// Cached memory that was not used for this time is released.
inline constexpr Nanos kTrim = 10 * kSecond;
/// Longest time that a coalesced message is kept back.
inline constexpr Nanos kGather = 50 * kMicrosecond;
/// Longest time that completions stay queued while a thread runs others.
inline constexpr Nanos kOutcomeGrace = 20 * kMillisecond;
/// Longest time that deferred completions stay queued.
inline constexpr Nanos kLazyGrace = 4 * kGrace;

struct Settings {
  Credo credo;
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

  Bell bell;
  bool idle = false;
  bool known = false;
  bool top_level = false;  // runs a request that counts against Settings::handlers
  bool running = false;
  ItemKind kind{};     // kind of the work item that it runs
  bool tells = false;  // it runs a peer event
  Spin spin{0};
  const void* engine = nullptr;  // the engine of its pool
};

struct EngineStats {
  std::size_t pending_calls = 0, queued_requests = 0, pool_threads = 0, running_handlers = 0, running_requests = 0,
              connections = 0, lanes = 0;
  std::uint64_t requests = 0, replies = 0, sent_messages = 0, received_messages = 0;
  PoolStats memory;
  std::size_t common_pieces = 0;  // multicast buffers in use by a message or a receiver
};

inline constexpr const char* kForked = "this process is a fork of its worker's, which cannot use its calls";

/// Leased memory for a segment of a message.
struct Loan {
  std::uint64_t connection;  // the only connection that can pass the memory on without a copy
  std::uint64_t lease;       // value for OutSegment::lease
  BlockPtr memory;           // see `Link::lend`
};

enum class WaitEnd : std::uint8_t { kDone, kDeadline, kInterrupted, kStopped };

/// Options of `Engine::start`.
struct CallOptions {
  Nanos deadline = kNever;
  bool nested = false;  // made inside a handler: exempt from the window, and always finds a thread
  bool lazy = false;    // no thread waits for the completion: links may go unread for it for kMostGrace, and a request
                        // that must be sent waits for a connection without limit
  bool aside = false;   // lazy, and the completion runs no user code: it may stay queued for kLazyGrace, and
                        // `take_lazy` may return it
  bool never_wait = false;                // wait neither for the window nor for the socket: unsent bytes are copied
  std::function<bool()> interrupted;      // polled while `start` waits; true ends the wait
  std::function<void()> before_blocking;  // called before `start` waits for another thread that sends to the same peer
  std::unique_ptr<Keep> cookie;           // if set, the completion goes to the pool unless a thread waits for it
  std::unique_ptr<Keep> linger;           // kept until the reply has arrived, even a late one, or the peer is lost
};

class Engine {
 public:
  explicit Engine(Settings settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- peers (engine_peers.cc). Any thread, never blocks.

  /// Opens a listener and returns the address for peers. Throws std::system_error.
  std::string listen(const std::string& address);
  void set_peer(PeerAddress peer);
  /// Closes all connections to the peer. Its calls fail with kPeerLost, and a peer event is queued.
  void forget_peer(std::int32_t id, const std::string& why);
  /// Closes all connections to the peer after a goodbye. Its calls fail with kPeerLost; no peer event is queued. The id
  /// may be given to another worker afterwards.
  void part_from(std::int32_t id, const std::string& why);

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
  WaitEnd wait(std::uint64_t call, Nanos deadline, const std::function<bool()>& interrupted, Outcome& out);
  /// Abandons a call. Its late reply is dropped. Never blocks.
  void give_up(std::uint64_t call);
  /// Adds the calls of `c` to a wait set: their completions go to `c` instead of the pool. Calls with a completion
  /// that the pool or a waiting thread has taken are listed in `c.elsewhere`. Returns false, without any change, if
  /// another thread waits for one of the calls. Never blocks.
  bool collect(Collector& c);
  /// Waits until a completion of the set has arrived and appends it to `out`, until none is left, or until
  /// `tell_collectors` is called. kStopped: no completion will arrive any more.
  WaitEnd wait(Collector& c, const std::function<bool()>& interrupted, std::deque<Item>& out);
  /// Wakes all wait sets, because the pool or a waiting thread has processed a completion. Never blocks.
  void tell_collectors();
  /// Dissolves a wait set: the pool gets the remaining completions and those in `left`. If the engine has stopped and
  /// the pool has no threads, `left` returns all of them. Never blocks.
  void stop_collecting(Collector& c, std::deque<Item>& left);
  /// Removes a completion that is queued for the pool; false if the pool has taken it or will. For use after `stop`,
  /// when the pool may have no threads. Never blocks.
  bool withdraw(std::uint64_t call);
  /// Takes a deferred completion if one is queued, which saves the pool the work. Never blocks.
  bool take_lazy(Item& out);
  /// Returns whether a deferred completion may be queued. A hint, read without the lock.
  bool has_lazy() const { return has_lazy_.load(std::memory_order_relaxed); }
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
  std::optional<Loan> lend(std::int32_t peer, std::uint64_t connection, std::size_t size);
  /// Allocates `size` bytes for a message to all of these peers (OutSegment::common), and announces the buffer to those
  /// on this host. Returns null if there is none.
  std::shared_ptr<Common> share(std::span<const std::int32_t> peers, std::size_t size);

  // ---- the pool (engine_wait.cc)

  /// Waits for the next work item. Returns false when the engine stops. Blocks; a thread of the pool only.
  bool next(PoolThread& self, Item& out);
  /// Returns the next work item if one is queued; otherwise returns false and changes nothing. Never blocks.
  bool try_next(PoolThread& self, Item& out);

  /// Reports that the thread which an item requested with `spawn` could not be started. A later item requests it again.
  void not_spawned();

  /// Requests one kNudge event in the pool after `delay`; calls until then are merged. Takes no lock and never blocks,
  /// so a finalizer may call it at any time.
  void nudge(Nanos delay);

  // ---- life

  /// Sends a goodbye to all peers, waits up to `linger` for queued bytes to be sent, fails every call, and ends the
  /// threads of the pool. Blocks for at most `linger`. May be called more than once.
  void stop(Nanos linger);
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  EngineStats stats() const;
  const std::shared_ptr<Pool>& pool() const { return pool_; }
  std::int32_t id() const { return settings_.credo.me.id; }

  /// Hooks of fork(), called by forks.cc. They hold the locks. The child closes every descriptor without sending
  /// anything, and its engine is stopped.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  struct Peer {
    Identity identity;
    std::vector<std::string> addresses;
    std::size_t next_address = 0;
    bool connecting = false;
    bool slow = false;      // an address tried in this round may still succeed
    Nanos retry_after = 0;  // pause before the next round
    Nanos retry_at = kNever;
    bool forgotten = false;
    bool was_lost = false;
    std::string last_error;
    ConnectionPtr link;  // carries the requests
    struct Waiting {
      std::unique_ptr<Outgoing> message;
      Nanos until;  // when its call stops waiting. Messages that the reference protocol counts on stay queued longer,
                    // until the peer is connected or known to be dead
    };
    std::deque<Waiting> waiting;  // messages that wait for a connection
  };
  using Kept = std::vector<std::unique_ptr<Keep>>;
  using Lock = std::unique_lock<std::mutex>;

  // engine_doors.cc
  void accept_from(Listener& listener);
  ConnectionPtr displaced_by(const std::string& source, std::size_t places) const;
  PeerUser user_of(const Link& link);
  static std::optional<std::string> objection(const PeerUser& user);
  void log_refusal(const Link& link, const std::string& source, const std::string& why, bool displaced = false);

  // engine_peers.cc
  ConnectionPtr add_connection(std::unique_ptr<Link> link, Handshake handshake, bool initiator);
  void connect(Lock& lock, Peer& peer);
  void unreachable(Peer& peer, const std::string& why, Kept& kept);
  void drop(Peer::Waiting&& waiting, const std::string& why, Kept& kept);
  void expire_waiting(Peer& peer, Nanos at, Kept& kept);
  void on_handshake(const ConnectionPtr& c, FrameType type, std::string_view body);
  void opened(const ConnectionPtr& c);
  void lost(const ConnectionPtr& c, std::string why);
  void log(std::string text);
  void expire_handshakes(Lock& lock, Nanos at);
  void remind(Nanos at);

  // engine_lanes.cc
  void widen(const ConnectionPtr& c);
  void open_lane(const ConnectionPtr& c);
  void join_lane(const ConnectionPtr& lane);
  static std::unique_ptr<Outgoing> frame(const Handshake::Step& step);

  // engine_send.cc
  enum class Sent { kGone, kQueued, kBroken };
  struct Passage {            // state of one message on its way to a link
    bool own = false;         // copy unsent bytes; else a message that waits for a connection gets a `departure`
    bool may_gather = false;  // it may be part of a burst, and may be coalesced
    const std::function<void()>* before_blocking = nullptr;
    ConnectionPtr via;
    std::uint64_t ticket = 0;
    std::shared_ptr<Departure> departure;
    std::unique_ptr<Keep> spent;  // owner of memory that has been copied
  };
  Sent transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Passage& p);
  Sent transmit(const ConnectionPtr& c, std::unique_ptr<Outgoing> m);
  Sent transmit_locked(const ConnectionPtr& c, std::unique_ptr<Outgoing>& m, Passage& p);
  Sent route(std::int32_t peer, std::unique_ptr<Outgoing>& m, Passage& p);
  void depart(const ConnectionPtr& c, std::deque<Peer::Waiting>& waiting);
  void flush(const ConnectionPtr& c);
  bool gather(const ConnectionPtr& c, const Outgoing& m, bool more);
  void release_gathered();
  void watch_writable(Connection& c, bool on);
  bool window_open(const Connection& c, std::int64_t size) const;
  void pass_window(Connection& c, std::int32_t peer, std::int64_t size);
  void tell_window(const ConnectionPtr& c);
  void take_up(const ConnectionPtr& c, std::int64_t size);
  void wait_until_gone(std::int32_t peer, Passage& p, Nanos deadline, const std::function<bool()>& interrupted);
  bool wait_for_link(std::int32_t peer, Passage& p, Nanos deadline, const std::function<bool()>& interrupted);
  void wait_while_it_leaves(PoolThread& self, const Passage& p);
  void own(const ConnectionPtr& c, std::uint64_t ticket);

  // engine_calls.cc
  void settle(std::uint64_t id, Outcome&& outcome, Kept& kept);
  void orphan(std::int32_t peer, Incoming&& m);
  void close_call(std::uint64_t id, bool replied, Kept& kept);
  bool take_back(std::uint64_t id, Outcome& out, Kept& kept);
  void stop_lingering(std::uint64_t id, Kept& kept);
  bool refused(const Connection& c, std::uint64_t id, Outgoing& m, Kept& kept);
  void on_message(const ConnectionPtr& c, Incoming&& m);
  void take_in_answers(const ConnectionPtr& c);
  void on_reply(const ConnectionPtr& c, Incoming&& m, Kept& kept);
  void expire_calls(Nanos at, Kept& kept);

  // engine_wait.cc
  enum class For { kReply, kOutcomes, kProgress };
  WaitEnd wait_for(For what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                   const std::function<bool()>& interrupted, std::uint64_t connection = 0);
  bool poll(Spin& spin, Nanos until, bool may_block, Gate::Pass pass = Gate::kCaller);
  bool look(int timeout_ms);
  bool glance();
  void bury(Connection& c);
  std::vector<ConnectionPtr> forget_dead();
  bool spin_once(std::uint32_t turn);
  bool put_to_sleep();
  bool read_from(const ConnectionPtr& c);
  void take_role();
  void release_role(bool to_user_code);
  void watch();
  void stay_awake_for(std::uint64_t connection);
  void stay_awake(const ConnectionPtr& c);
  void set_outer(bool enabled);
  void wake_for_work();
  bool pop(PoolThread& self, Item& out);
  void park(Lock& lock, PoolThread& self);
  bool idle(Lock& lock, PoolThread& self);
  PoolThread* this_thread() const;
  void arrive(PoolThread& self);
  void leave(Lock& lock, const Item& item);
  void push(Item&& item);
  void hurry_lazy();
  void tell(Item&& news);
  void told();
  bool has_work() const;
  bool has_requests() const;
  bool has_urgent() const;
  bool finishes_calls() const;
  void arm_timer(Nanos at);
  void keep_time();
  void tick(Lock& lock);
  void tick_if_due(Nanos at);
  void kick();
  void ring_park();
  void ring_progress();

  const Settings settings_;
  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<Commons> commons_;
  mutable std::mutex mutex_;

  // Descriptors.
  static constexpr std::uint64_t kKickToken = 1, kInnerToken = 2, kParkToken = 3, kNudgeToken = 4, kFirstToken = 16;
  static constexpr std::uint64_t kLanes = std::uint64_t{1} << 63;  // or-ed to a link's token: its `lanes_fd`
  Descriptor inner_, outer_, kick_, park_bell_, timer_, nudge_;
  std::atomic<bool> nudged_ = false;
  std::uint64_t next_token_ = kFirstToken;  // links and listeners
  std::unordered_map<std::uint64_t, ConnectionPtr> connections_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Listener>> listeners_;
  std::vector<ConnectionPtr> widened_;  // links with a new lane, not polled yet; leader only
  UserLookup users_;                    // leader only
  std::unique_ptr<Link> arriving_;      // accepted; the user of its peer is being looked up
  Nanos refusals_since_ = 0;            // start of the interval in which `refusals_` rejected connections were logged
  std::size_t refusals_ = 0;
  Nanos crowd_told_at_ = -3600 * kSecond;  // when displaced connections were last logged
  Nanos handshakes_at_ = kNever;           // when a handshake expires or a reconnect is due

  std::map<std::int32_t, Peer> peers_;
  CallTable calls_;
  std::vector<Collector*> collectors_;
  struct Lingering {
    std::uint64_t connection;
    std::unique_ptr<Keep> keep;
  };
  std::unordered_map<std::uint64_t, Lingering> lingering_;  // by id of a call that ended without its reply
  std::vector<ConnectionPtr> gathering_;                    // connections with coalesced messages
  std::atomic<Nanos> gathering_since_ = kNever;             // when the first of these was coalesced

  // Work for the pool.
  std::deque<Item> urgent_;             // completions, one-way messages, events
  std::deque<Item> lazy_;               // deferred completions: run when no other work is queued, or after a while
  std::atomic<bool> has_lazy_ = false;  // hint, read without the mutex
  bool telling_ = false;                // a peer event is in `urgent_` or running
  std::deque<Item> news_;               // later peer events, so that the loss of a peer is handled before its return
  std::deque<Item> nested_;
  std::deque<Item> top_;
  std::size_t running_top_ = 0, running_ = 0, running_requests_ = 0, finishing_ = 0, threads_ = 0;
  bool spawning_ = false;
  const std::size_t spinning_;  // while this number of pool threads run items, the others do not spin

  // The scheduler.
  std::atomic<bool> role_held_ = false;  // there is a leader; written under the mutex
  Gate gate_;                            // lets a caller replace a spinning leader of the pool
  bool in_outer_ = false;                // inner_ is enabled in outer_
  PoolThread* parked_ = nullptr;         // sleeps on outer_
  std::vector<PoolThread*> idle_;        // asleep on their parkers; most recent last
  std::list<Waiter*> sleepers_;          // callers asleep
  std::list<Waiter*> progress_;          // those that wait for credit or for bytes to be sent
  Nanos released_at_ = 0;
  Nanos grace_ = kGrace;                  // how long links may then go unread; longer if a thread polled in time
  Nanos popped_at_ = 0;                   // when a pool thread last took an item
  Nanos finished_at_ = 0;                 // when a pool thread last took a completion
  std::atomic<Nanos> timer_at_ = kNever;  // written with the mutex held
  Nanos trim_at_ = 0;
  Spin caller_spin_;  // of the leading caller
  bool leaving_ = false, stopped_ = false, quit_ = false, forked_ = false;
  std::atomic<int> progress_waiters_ = 0;

  // Owned by the leader; under the mutex, by any thread while there is no leader.
  ConnectionPtr hot_;
  std::vector<ConnectionPtr> awake_;    // busy-polled connections, see Link::stay_awake
  std::atomic<bool> has_dead_ = false;  // a connection has closed that the leader may reference
  std::uint32_t glances_ = 0;
  std::uint64_t arrivals_ = 0;
  std::vector<Incoming> answers_;  // replies of the current link that have been read but not processed

  std::atomic<std::uint64_t> sent_messages_ = 0, received_messages_ = 0;
  std::uint64_t requests_ = 0, replies_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread timekeeper_;
};

}  // namespace telegrad

// The engine: everything native that one worker owns.
//
// It moves messages between this worker and its peers, matches replies to calls, keeps deadlines, and decides which
// thread does what. It has one thread of its own, which only keeps time; all I/O is done by the threads that wait.
//
// The polling role. At most one thread at a time reads from the links: it "holds the role". A thread that waits for a
// reply takes the role if it is free, so the reply reaches it without a thread hop; otherwise it sleeps on its bell.
// The threads of the pool (threads inside `next`) take it when nobody else has it, spin for a moment, and then park:
// one of them sleeps in the kernel on `outer_`, which contains `inner_`, which contains every link. A caller that takes
// the role from a parked thread takes `inner_` out of `outer_`, so that data for the caller does not wake the
// parked thread; the timekeeper puts it back if nobody has polled for kGrace ("watching"). From a thread of the pool
// that spins a caller takes it between two looks (core/gate.h): it must not sleep while another thread looks out for
// it.
//
// A thread that waits inside user code never runs a request: it queues what it reads and wakes a pool thread. A pool
// thread that reads a request runs it. When it comes back within kGrace nobody else was woken in vain.
//
// Links through memory that have lately had something stay awake: the holder of the role looks into them by itself, and
// their peers need not wake it. Whoever sleeps, or lets the parked thread watch, puts them to sleep first.
//
// Bursts. Small messages that follow each other at once are held by the link and leave together (`gather`); who waits,
// who polls and the timekeeper see to it that none stays behind.
//
// Locks: mutex_ guards the scheduler, calls, peers and queues; each connection's send_mutex guards its sending. Neither
// is held while anything blocks, nor while memory of the layer above is freed, and no lock of the layer above (the GIL)
// is taken under them. send_mutex may be taken first, then mutex_; never the other way round.
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

/// How long links may go unread, or work unstarted, before another thread is woken for it.
inline constexpr Nanos kGrace = 500 * kMicrosecond;
/// The same for links, after handlers that all came back sooner.
inline constexpr Nanos kMostGrace = 4 * kGrace;
/// How much later than who polls the timekeeper looks at the clock: a thread that wakes up beside two that spin takes a
/// core from one of them.
inline constexpr Nanos kTimerSlack = 200 * kMicrosecond;
/// Memory kept warm for longer than this is given back.
inline constexpr Nanos kTrim = 10 * kSecond;
/// How long a message of a burst may wait for others to leave with.
inline constexpr Nanos kGather = 50 * kMicrosecond;
/// The same for finished calls that wait while a thread is at others.
inline constexpr Nanos kOutcomeGrace = 20 * kMillisecond;
/// How long replies that may be taken aside may lie.
inline constexpr Nanos kLazyGrace = 4 * kGrace;

struct Settings {
  Credo credo;
  Nanos spin = 50 * kMicrosecond;  // how long a waiting thread looks before it sleeps
  std::size_t handlers = 16;       // requests from outside handlers that run at the same time
  std::int64_t window = 64 << 20;  // request bytes a peer may have waiting here
  std::size_t pool_cache = std::size_t{1} << 30;
  Nanos handshake_timeout = 10 * kSecond;
  Nanos connect_timeout = 30 * kSecond;  // how long a call may wait for a link; 0: for ever
  bool check_uid = true;                 // refuse same-host peers of another user
};

struct PeerAddress {
  Identity identity;
  std::vector<std::string> addresses;  // in the order to try them
};

/// A thread of the pool, from its first `next` to its last.
struct PoolThread {
  ~PoolThread();

  Bell bell;
  bool idle = false;
  bool known = false;
  bool top_level = false;  // runs a request that counts against Settings::handlers
  bool running = false;
  ItemKind kind{};     // of what it runs
  bool tells = false;  // it runs news of a peer
  Spin spin{0};
  const void* engine = nullptr;  // whose pool it belongs to
};

struct EngineStats {
  std::size_t pending_calls = 0, queued_requests = 0, pool_threads = 0, running_handlers = 0, running_requests = 0,
              connections = 0, lanes = 0;
  std::uint64_t requests = 0, replies = 0, sent_messages = 0, received_messages = 0;
  PoolStats memory;
  std::size_t common_pieces = 0;  // in common memory, that a message or a receiver has
};

inline constexpr const char* kForked = "this process is a fork of its worker's, which cannot use its calls";

/// Memory that a link has lent for a message's segment.
struct Loan {
  std::uint64_t connection;  // over which it may go
  std::uint64_t lease;       // what OutSegment::lease is to say then
  BlockPtr memory;           // see `Link::lend`
};

enum class WaitEnd : std::uint8_t { kDone, kDeadline, kInterrupted, kStopped };

/// What `start` is told about a call.
struct CallOptions {
  Nanos deadline = kNever;
  bool nested = false;  // made inside a handler: exempt from the window, and always finds a thread
  bool lazy = false;    // nobody waits for its outcome: the links may go unread for it for kMostGrace, and if it must
                        // be sent it waits for a link without end
  bool aside = false;   // and its reply may lie for kLazyGrace; it runs no user code, so `take_lazy` may have it
  bool never_wait = false;  // wait neither for the window nor for segments to leave: what does not leave is copied
  std::function<bool()> interrupted;      // asked now and then while `start` waits: should it stop waiting?
  std::function<void()> before_blocking;  // called before `start` waits for another thread that sends to the same peer
  std::unique_ptr<Keep> cookie;           // given: the outcome goes to the pool unless somebody waits for it
  std::unique_ptr<Keep> linger;
};

class Engine {
 public:
  explicit Engine(Settings settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- peers (engine_peers.cc). Any thread, never blocks.

  /// Listens; returns the address for peers. Throws std::system_error.
  std::string listen(const std::string& address);
  void set_peer(PeerAddress peer);
  /// Closes the links to it; its calls fail as kPeerLost.
  void forget_peer(std::int32_t id, const std::string& why);
  /// The same with a goodbye, and without an event: whoever calls this knows. Another worker may have the id then.
  void part_from(std::int32_t id, const std::string& why);

  // ---- calls (engine_calls.cc). Any thread.

  /// Opens a call and sends its request. May wait (no longer than the deadline) for the peer's window, and for the
  /// request's segments to leave their memory. Never fails: what goes wrong is the call's outcome. A request that has
  /// left by then is still the caller's, to give up what it keeps.
  std::uint64_t start(std::int32_t peer, std::unique_ptr<Outgoing>&& request, CallOptions options);
  /// Would a request of this size pass the peer's window without waiting?
  bool may_send_now(std::int32_t peer, std::uint64_t payload) const;
  /// Waits for the outcome of a call. kDone: taken, the call is over. kStopped: there is no such call any more (its
  /// outcome went to the pool). After kDeadline the call goes on until `give_up`. So it does after kInterrupted; if it
  /// has ended meanwhile, its outcome waits for the next `wait` or `give_up`.
  WaitEnd wait(std::uint64_t call, Nanos deadline, const std::function<bool()>& interrupted, Outcome& out);
  /// The caller stops waiting; a late reply is dropped.
  void give_up(std::uint64_t call);
  /// From now on what becomes of `c.calls` is brought to `c`, not to the pool; but what the pool or a thread that
  /// waited has in hand, it goes on with: see `c.elsewhere`. False: somebody else waits for one of them, and nothing
  /// has changed.
  bool collect(Collector& c);
  /// Waits until something has come, which it adds to `out`, or nothing is left to come, or `tell_collectors` is
  /// called. kStopped: nothing will come.
  WaitEnd wait(Collector& c, const std::function<bool()>& interrupted, std::deque<Item>& out);
  /// Somebody is done with what was in its hands when one who collects began.
  void tell_collectors();
  /// The pool has the rest, and `left`, of what `wait` has brought. All of that is in `left` afterwards if the engine
  /// has been stopped and nobody is in the pool any more.
  void stop_collecting(Collector& c, std::deque<Item>& left);
  /// Takes back an outcome that has been put down for the pool; false if the pool has it, or will. After `stop`, when
  /// there may be nobody left in the pool.
  bool withdraw(std::uint64_t call);
  /// Takes the outcome of a lazy call, if one is there: callers that pass by spare the pool the work. Never blocks.
  bool take_lazy(Item& out);
  /// Is one there? A hint.
  bool has_lazy() const { return has_lazy_.load(std::memory_order_relaxed); }
  /// Sends a reply on the connection of the request; dropped when that is gone. A thread of the pool waits until it has
  /// left its memory, as long as the peer reads; other threads, and whoever says that it may not wait, never do. What
  /// has not left by then is copied. A reply that has left is still the caller's.
  void reply(std::uint64_t connection, std::uint64_t call, std::unique_ptr<Outgoing>&& reply, bool may_wait,
             const std::function<void()>& before_blocking = {});
  /// What the body of a reply on a connection may be at most.
  std::uint64_t largest_body(std::uint64_t connection) const;
  /// Sends a message that is never answered; copies what does not leave at once, and never waits. False when the peer
  /// is known to be unreachable.
  bool send(std::int32_t peer, std::unique_ptr<Outgoing> message);

  // ---- memory (engine_memory.cc). Any thread, never blocks.

  /// Memory of `size` bytes for what is to go to a peer: over a connection if that is the peer's (which may be -1, for
  /// whoever it is), else over the link that requests go over. Nothing if that has none to lend.
  std::optional<Loan> lend(std::int32_t peer, std::uint64_t connection, std::size_t size);
  /// Memory of `size` bytes for what goes to all of these peers (OutSegment::common), of which those on this host are
  /// told that it will come; null if there is none.
  std::shared_ptr<Common> share(std::span<const std::int32_t> peers, std::size_t size);

  // ---- the pool (engine_wait.cc)

  /// The next thing to do; blocks. False when the engine stops.
  bool next(PoolThread& self, Item& out);
  /// The same if there is something at once; else false, and nothing has changed. Never blocks.
  bool try_next(PoolThread& self, Item& out);

  /// The thread that an item asked for with `spawn` could not be started; a later item asks again.
  void not_spawned();

  /// Asks for one kNudge event in the pool after `delay`, however often it is called until then. Takes no lock and
  /// never waits, so a finalizer may call it at any point.
  void nudge(Nanos delay);

  // ---- life

  /// Says goodbye, gives queued bytes `linger` to leave, fails every call, sends pool threads home. Blocks at most
  /// `linger`. Safe to call twice.
  void stop(Nanos linger);
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  EngineStats stats() const;
  const std::shared_ptr<Pool>& pool() const { return pool_; }
  std::int32_t id() const { return settings_.credo.me.id; }

  /// Around fork(), called by forks.cc: holds the locks, and in the child closes every descriptor without a word. From
  /// then on the child's engine is a stopped one.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  struct Peer {
    Identity identity;
    std::vector<std::string> addresses;
    std::size_t next_address = 0;
    bool connecting = false;
    bool slow = false;      // an address tried in this round may lead to it yet
    Nanos retry_after = 0;  // the pause before the next round
    Nanos retry_at = kNever;
    bool forgotten = false;
    bool was_lost = false;
    std::string last_error;
    ConnectionPtr link;  // where requests go
    struct Waiting {
      std::unique_ptr<Outgoing> message;
      Nanos until;  // how long its call waits. What its protocol relies on is kept all the same, until the peer is
                    // reached or known to be dead
    };
    std::deque<Waiting> waiting;  // until there is one
  };
  using Kept = std::vector<std::unique_ptr<Keep>>;
  using Lock = std::unique_lock<std::mutex>;

  // engine_doors.cc
  void accept_from(Listener& listener);
  ConnectionPtr displaced_by(const std::string& source, std::size_t places) const;
  std::optional<std::string> objection(const Link& link);
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
  struct Passage {     // how a message goes, and where it has got to
    bool own = false;  // what does not leave at once is copied; else `departure` is made for what waits for a link
    bool may_gather = false;  // it is one of a burst perhaps, and may leave with others
    const std::function<void()>* before_blocking = nullptr;
    ConnectionPtr via;
    std::uint64_t ticket = 0;
    std::shared_ptr<Departure> departure;
    std::unique_ptr<Keep> spent;  // what kept memory that has been copied
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
  static constexpr std::uint64_t kLanes = std::uint64_t{1} << 63;  // with a link's token: its `lanes_fd`
  Descriptor inner_, outer_, kick_, park_bell_, timer_, nudge_;
  std::atomic<bool> nudged_ = false;
  std::uint64_t next_token_ = kFirstToken;  // links and listeners
  std::unordered_map<std::uint64_t, ConnectionPtr> connections_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Listener>> listeners_;
  std::vector<ConnectionPtr> widened_;  // links that have got a lane, to be looked at; the polling thread's
  UserLookup users_;                    // the polling thread's
  Nanos refusals_since_ = 0;            // strangers that were refused, and how many of them have been logged
  std::size_t refusals_ = 0;
  Nanos crowd_told_at_ = -3600 * kSecond;  // when a line was last about those that others have displaced
  Nanos handshakes_at_ = kNever;           // when a handshake or a retry is due

  std::map<std::int32_t, Peer> peers_;
  CallTable calls_;
  std::vector<Collector*> collectors_;
  struct Lingering {
    std::uint64_t connection;
    std::unique_ptr<Keep> keep;
  };
  std::unordered_map<std::uint64_t, Lingering> lingering_;  // by id of a call that ended without its reply
  std::vector<ConnectionPtr> gathering_;                    // whose links hold messages
  std::atomic<Nanos> gathering_since_ = kNever;             // the first of them

  // Work for the pool.
  std::deque<Item> urgent_;  // outcomes, one-way messages, events
  std::deque<Item> lazy_;    // replies to lazy calls: taken when there is nothing else, or after a while with `urgent_`
  std::atomic<bool> has_lazy_ = false;  // is there one? A hint, for who has not the mutex
  bool telling_ = false;                // news of a peer are in there, or under way:
  std::deque<Item> news_;  // further ones wait, so that the loss of a peer is over before its return begins
  std::deque<Item> nested_;
  std::deque<Item> top_;
  std::size_t running_top_ = 0, running_ = 0, running_requests_ = 0, finishing_ = 0, threads_ = 0;
  bool spawning_ = false;
  const std::size_t spinning_;  // while so many threads of the pool run something, the others do not spin

  // The scheduler.
  std::atomic<bool> role_held_ = false;  // written under the mutex
  Gate gate_;                            // how a caller takes the role from the pool
  bool in_outer_ = false;                // inner_ is enabled in outer_
  PoolThread* parked_ = nullptr;         // sleeps on outer_
  std::vector<PoolThread*> idle_;        // sleep on their bells; the last one slept last
  std::list<Waiter*> sleepers_;          // callers asleep
  std::list<Waiter*> progress_;          // those of them who wait for credit or for bytes to leave
  Nanos released_at_ = 0;
  Nanos grace_ = kGrace;                  // how long after that links may go unread; grows while nobody is needed then
  Nanos popped_at_ = 0;                   // when a pool thread last took something
  Nanos finished_at_ = 0;                 // the same for a finished call
  std::atomic<Nanos> timer_at_ = kNever;  // written with the mutex held
  Nanos trim_at_ = 0;
  Spin caller_spin_;  // the polling caller's
  bool leaving_ = false, stopped_ = false, quit_ = false, forked_ = false;
  std::atomic<int> progress_waiters_ = 0;

  // The polling thread's; under the mutex, whoever's while nobody holds the role.
  ConnectionPtr hot_;
  std::vector<ConnectionPtr> awake_;    // links that are looked into without a system call, see Link::stay_awake
  std::atomic<bool> has_dead_ = false;  // a link has ended that the polling thread may hold
  std::uint32_t glances_ = 0;
  std::uint64_t arrivals_ = 0;
  std::vector<Incoming> answers_;  // replies read and not taken in yet, of the link being read

  std::atomic<std::uint64_t> sent_messages_ = 0, received_messages_ = 0;
  std::uint64_t requests_ = 0, replies_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread timekeeper_;
};

}  // namespace telegrad

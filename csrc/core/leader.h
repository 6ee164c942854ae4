// The leader: the only thread that reads the links of an engine at a time.
//
// A thread that waits for a reply becomes the leader if there is none, so that the reply reaches it without a thread
// switch; otherwise it sleeps on its parker. Threads of the pool (inside `next`) become the leader if no caller is.
// They spin for a moment and then park: one of them sleeps in epoll on `park_epoll_`, which contains `links_epoll_`,
// which contains every link. A caller that replaces a parked leader disables `links_epoll_` in `park_epoll_`, so that
// data for the caller does not wake the parked thread. The timer thread enables it again ("watches the links") if no
// thread has polled for kHandoffDelay. A caller replaces a spinning leader between two of its polls
// (core/leader_handoff.h), because the caller must not sleep while another thread polls on its behalf.
//
// A thread that waits inside user code never runs a request: it queues the requests that it reads and wakes a thread of
// the pool. A thread of the pool runs the request that it reads. If it returns within kHandoffDelay, no other thread is
// woken.
//
// Busy polling. The leader reads memory-mapped links that were active lately without a system call, and their peers
// need not wake it. Before the leader sleeps, or the parked thread watches the links, the wake-up of these links is
// enabled again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <vector>

#include "base/thread_safety.h"
#include "base/unique_fd.h"
#include "core/call_slab.h"
#include "core/connection.h"
#include "core/leader_handoff.h"
#include "core/spin.h"
#include "core/tuning.h"
#include "core/work_queue.h"

namespace telegrad {

struct EngineParts;

enum class WaitEnd : std::uint8_t { kDone, kDeadline, kInterrupted, kStopped };

/// Reason for which a thread waits: a reply, completions of a wait set, or progress in sending.
enum class WaitFor : std::uint8_t { kReply, kCompletions, kProgress };

class Leader {
 public:
  /// Throws std::system_error.
  explicit Leader(EngineParts& parts);

  // ---- waiting

  /// Waits until `done` returns true, which is called with the mutex held. Polls or sleeps meanwhile, without the
  /// mutex. `connection`: the one that the thread waits for, or 0.
  WaitEnd wait_for(Lock& lock, WaitFor what, Waiter& w, const std::function<bool()>& done, Nanos deadline,
                   const std::function<bool()>& interrupted, std::uint64_t connection = 0) REQUIRES(engine_mutex);
  /// Waits in the same way for progress in sending, by a caller without the mutex.
  WaitEnd wait_for_progress(Waiter& w, const std::function<bool()>& done, Nanos deadline,
                            const std::function<bool()>& interrupted) EXCLUDES(engine_mutex);
  /// See `Engine::next`.
  bool next(PoolThread& self, WorkItem& out) EXCLUDES(engine_mutex);

  // ---- leadership

  bool exists() const { return has_leader_.load(std::memory_order_seq_cst); }
  /// Ensures that a thread is woken when a link has data while there is no leader.
  void watch_links() REQUIRES(engine_mutex);
  /// Watches the links if no thread has polled for a while.
  void on_timer(Nanos at) REQUIRES(engine_mutex);
  /// Reads the links on the timer thread if no other thread has been free to for a while.
  void read_for_timer() EXCLUDES(engine_mutex);
  /// Returns how often all links have been read. Any thread.
  std::uint64_t reads() const { return reads_.load(std::memory_order_relaxed); }
  /// Returns how long links may go unread; longer if a thread polled in time.
  Nanos handoff_delay() const REQUIRES(engine_mutex) { return handoff_delay_; }

  // ---- wake-ups

  /// Makes the leader's poll return. Any thread.
  void interrupt_poll();
  bool is_parked() const REQUIRES(engine_mutex) { return parked_ != nullptr; }
  void notify_parked();
  bool has_sleeping_callers() const REQUIRES(engine_mutex) { return !sleeping_callers_.empty(); }
  void notify_sleeping_callers() REQUIRES(engine_mutex);
  /// Wakes the threads that wait for credit or for bytes to be sent.
  void notify_progress() REQUIRES(engine_mutex);
  /// Requests one kCallback event. See `Engine::request_callback`.
  void request_callback(Nanos delay);

  // ---- links

  /// Polls a descriptor for input; `token` names it in `poll_fds`.
  void add_fd(int fd, std::uint64_t token);
  void remove_fd(int fd);
  /// Polls for output too.
  void set_writable(int fd, std::uint64_t token, bool on);

  /// Marks a connection as closed. The leader drops its references to it.
  void mark_closed(Connection& c);
  /// Returns the closed connections that the leader referenced. The leader only; any thread with the mutex if there is
  /// none. Destroy them while the mutex is not held, because this unmaps shared memory.
  std::vector<ConnectionPtr> reap_closed();

  std::uint64_t received_messages() const { return received_messages_.load(std::memory_order_relaxed); }

  void abandon_in_child() REQUIRES(engine_mutex);

 private:
  static constexpr std::uint64_t kInterruptToken = 1, kLinksToken = 2, kParkToken = 3, kCallbackToken = 4;

  void become_leader() REQUIRES(engine_mutex);
  void resign(bool to_user_code) REQUIRES(engine_mutex);
  void promote_sleeping_caller() REQUIRES(engine_mutex);
  void set_links_watched(bool enabled) REQUIRES(engine_mutex);
  void park(Lock& lock, PoolThread& self) REQUIRES(engine_mutex);

  // leader.cc: one wait of a caller.
  struct Wait {
    Waiter& waiter;
    const std::function<bool()>& done;
    const std::function<bool()>& interrupted;
    const std::uint64_t connection;
    bool leading = false;
    int requests_read = 0;  // by this thread, since it has slept
  };
  WaitEnd wait_until(Lock& lock, Wait& wait, Nanos deadline) REQUIRES(engine_mutex);
  void try_to_lead(Wait& wait) REQUIRES(engine_mutex);
  bool lead_once(Lock& lock, Wait& wait, Nanos until) REQUIRES(engine_mutex);
  bool sleep_once(Lock& lock, Wait& wait, Nanos until) REQUIRES(engine_mutex);
  static bool is_interrupted(Lock& lock, const Wait& wait) REQUIRES(engine_mutex);

  // Leader only, while the mutex is not held (leader_poll.cc).
  bool poll(Spin& spin, Nanos until, bool may_block, LeaderHandoff::Term term = LeaderHandoff::kCallerTerm)
      EXCLUDES(engine_mutex);
  void after_poll() EXCLUDES(engine_mutex);
  bool poll_once(std::uint32_t turn);
  bool poll_fds(int timeout_ms) EXCLUDES(engine_mutex);
  bool poll_memory();
  bool read_from(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void count_read(int events, int most);
  void on_message(const ConnectionPtr& c, Incoming&& m) EXCLUDES(engine_mutex);
  void answer_ping(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void enable_busy_poll(const ConnectionPtr& c);
  // By a thread that becomes the leader.
  void enable_busy_poll_for(std::uint64_t connection) REQUIRES(engine_mutex);
  // Leader, or any thread with the mutex if there is none.
  bool arm_wakeups();

  EngineParts& parts_;
  UniqueFd links_epoll_, park_epoll_, interrupt_fd_, park_fd_, callback_fd_;
  std::atomic<bool> callback_requested_ = false;

  std::atomic<bool> has_leader_ = false;                 // written under the mutex
  LeaderHandoff handoff_;                                // lets a caller replace a spinning leader of the pool
  bool links_watched_ GUARDED_BY(engine_mutex) = false;  // links_epoll_ is enabled in park_epoll_
  PoolThread* parked_ GUARDED_BY(engine_mutex) = nullptr;
  std::list<Waiter*> sleeping_callers_ GUARDED_BY(engine_mutex);
  std::list<Waiter*> progress_ GUARDED_BY(engine_mutex);  // those that wait for credit or for bytes to be sent
  std::atomic<int> progress_waiters_ = 0;                 // their number
  Nanos released_at_ GUARDED_BY(engine_mutex) = 0;        // when the last leader resigned
  bool unread_ GUARDED_BY(engine_mutex) = false;          // no thread was free to read the links when they were due
  Nanos handoff_delay_ GUARDED_BY(engine_mutex) = kHandoffDelay;
  Spin caller_spin_;              // of the leading caller
  const std::size_t spin_limit_;  // while this number of pool threads run items, the others do not spin

  // Owned by the leader; by any thread with the mutex while there is no leader.
  ConnectionPtr last_active_;
  std::vector<ConnectionPtr> busy_polled_;  // see Link::enable_busy_poll
  std::atomic<bool> has_closed_ = false;    // a connection has closed that the leader may reference
  std::uint32_t memory_polls_ = 0;
  std::uint64_t arrivals_ = 0;
  std::atomic<std::uint64_t> received_messages_ = 0;
  int events_since_read_ = 0;     // of polls that may have left out links
  std::atomic<int> watched_ = 2;  // descriptors in links_epoll_; at first the interrupt and the callback
  std::atomic<std::uint64_t> reads_ = 0;
};

}  // namespace telegrad

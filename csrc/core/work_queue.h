// Work items for the threads of the pool, and the idle ones among these threads.
//
// Requests of the top level run on a limited number of threads (Settings::handlers). Nested requests, completions,
// one-way messages and events always find a thread: the last free thread that takes an item is asked to start another.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "core/parker.h"
#include "core/spin.h"
#include "core/tuning.h"
#include "core/work_item.h"

namespace telegrad {

struct EngineParts;
struct Snapshot;

/// The request that a thread of the pool runs.
struct RunningRequest {
  void cancel() { canceled = !must_run; }
  std::uint64_t connection = 0;
  std::uint64_t call = 0;  // 0: none
  bool must_run = false;   // kMustRun: it cannot be canceled
  bool canceled = false;
  bool late = false;  // see Canceler::mark_late
  std::int32_t peer = -1;
  std::uint32_t depth = 0;  // of nested calls
  Nanos since = 0;          // when the thread took it
};

/// A thread of the pool, from its first call of `next` to its last.
struct PoolThread {
  ~PoolThread();

  Parker parker;
  bool known = false;
  bool top_level = false;  // runs a request that counts against Settings::handlers
  bool running = false;
  WorkKind kind{};               // kind of the work item that it runs
  bool runs_peer_event = false;  // it runs a peer event
  Spin spin{0};
  const void* queue = nullptr;  // the work queue of its pool
  RunningRequest* request = nullptr;
};

struct WorkQueueStats {
  std::size_t queued_requests = 0, pool_threads = 0, running_handlers = 0, running_requests = 0;
  std::uint64_t requests = 0;
};

class WorkQueue {
 public:
  /// `handlers`: top-level requests that run at the same time.
  WorkQueue(EngineParts& parts, std::size_t handlers) : parts_(parts), handlers_(handlers) {}

  // ---- items

  /// Queues an item. Wakes no thread.
  void push(WorkItem&& item) REQUIRES(engine_mutex);
  /// Queues a request and counts it.
  void push_request(WorkItem&& item) REQUIRES(engine_mutex);
  /// Queues a completion that no thread waits for (kDeferDelay).
  void defer(WorkItem&& item) REQUIRES(engine_mutex);
  /// Queues a peer event. The pool runs peer events one at a time, so that the loss of a peer is handled before its
  /// return.
  void push_peer_event(WorkItem&& event) REQUIRES(engine_mutex);
  /// Queues a line for the log of the layer above.
  void log(std::string text) REQUIRES(engine_mutex);
  /// Queues the deferred completions for the pool.
  void flush_deferred() REQUIRES(engine_mutex);

  /// Takes the completion of a call if it is among the first items. A caller that waits for its calls in the order in
  /// which they were made finds it there.
  bool take_completion(std::uint64_t call, Completion& out, Released& released) REQUIRES(engine_mutex);
  /// Takes the completions of calls (in ascending order) that are queued for the pool.
  void take_completions(const std::vector<std::uint64_t>& calls, std::deque<WorkItem>& out) REQUIRES(engine_mutex);
  /// See the functions of the engine.
  bool take_deferred(WorkItem& out) EXCLUDES(engine_mutex);
  bool has_deferred() const { return has_deferred_.load(std::memory_order_relaxed); }
  bool remove_completion(std::uint64_t call) EXCLUDES(engine_mutex);

  // ---- canceled requests

  /// Marks the queued requests of a connection for which `is_canceled` returns true, except those that run anyway. They
  /// need no handler: they move to the queue of nested requests. Wakes no thread.
  void cancel_queued(std::uint64_t connection, const std::function<bool(std::uint64_t)>& is_canceled)
      REQUIRES(engine_mutex);
  /// Returns the request if a thread of the pool runs it, else null.
  RunningRequest* find_running(std::uint64_t connection, std::uint64_t call) REQUIRES(engine_mutex);
  /// Marks the running requests of a connection.
  void cancel_running(std::uint64_t connection) REQUIRES(engine_mutex);
  /// Records that the calling thread answers a request. Returns whether it is late.
  bool end_request(std::uint64_t connection, std::uint64_t call) REQUIRES(engine_mutex) {
    const PoolThread* self = this_thread();
    if (!self || self->request->call != call || self->request->connection != connection) return false;
    return std::exchange(*self->request, {}).late;
  }

  // ---- reply window

  /// Holds the requests of a connection, queued and new ones: its peer has not read enough of its replies.
  void hold(std::uint64_t connection) REQUIRES(engine_mutex);
  /// Queues the requests of a connection that were held. Wakes no thread.
  void release(std::uint64_t connection) REQUIRES(engine_mutex);
  /// Releases the connections for which `may_go_on` returns true, and wakes a thread for their requests.
  void release_if(const std::function<bool(std::uint64_t)>& may_go_on) REQUIRES(engine_mutex);

  // ---- threads

  /// Registers a thread that is new, or that has finished its item.
  void enter(PoolThread& self) REQUIRES(engine_mutex);
  /// Takes the next item that the thread may run.
  bool pop(PoolThread& self, WorkItem& out) REQUIRES(engine_mutex);
  /// Unregisters a thread that exits.
  void leave(PoolThread& self) REQUIRES(engine_mutex) {
    --threads_;
    free_requests_.push_back(self.request);
  }
  /// Sleeps on the thread's parker. Returns false if the thread was idle for so long that it may exit.
  bool sleep(Lock& lock, PoolThread& self) REQUIRES(engine_mutex);
  /// Reports that the thread which an item requested could not be started.
  void spawn_failed() EXCLUDES(engine_mutex);
  /// Stops counting a thread as running a top-level request; returns whether it was counted. `resume` counts it again.
  bool suspend(PoolThread& self) REQUIRES(engine_mutex);
  void resume(PoolThread& self) REQUIRES(engine_mutex);
  /// Returns the calling thread if it belongs to the pool, else null.
  PoolThread* this_thread() const;

  // ---- wake-ups

  /// Wakes a thread of the pool if there is work that the calling thread will not do.
  void wake_for_work() REQUIRES(engine_mutex);
  bool has_idle_thread() const REQUIRES(engine_mutex) { return !idle_.empty(); }
  void notify_idle_thread() REQUIRES(engine_mutex) { idle_.back()->parker.notify(); }
  void notify_idle_threads() REQUIRES(engine_mutex);
  /// Wakes threads for items that have waited for too long.
  void on_timer(Nanos at) REQUIRES(engine_mutex);

  // ---- state

  /// Returns whether one more thread should take an item now. A thread that runs completions also takes the next ones,
  /// unless it is blocked: while the program holds the GIL, more threads would only queue for it.
  bool has_work() const REQUIRES(engine_mutex) { return has_requests() || has_urgent(); }
  bool has_requests() const REQUIRES(engine_mutex) {
    return !nested_.empty() || (!top_.empty() && running_top_ < handlers_);
  }
  bool has_urgent() const REQUIRES(engine_mutex) {
    return !urgent_.empty() && (urgent_.front().kind != WorkKind::kCompletion || !is_running_completions());
  }
  /// Returns whether items are queued that are no requests, for any thread.
  bool has_urgent_items() const REQUIRES(engine_mutex) { return !urgent_.empty(); }
  /// Returns whether a thread of the pool is running completions and is not blocked.
  bool is_running_completions() const REQUIRES(engine_mutex) {
    return running_completions_ > 0 && now() - completion_taken_at_ < kCompletionDelay;
  }
  std::size_t running() const REQUIRES(engine_mutex) { return running_; }
  std::size_t threads() const REQUIRES(engine_mutex) { return threads_; }
  WorkQueueStats stats() const REQUIRES(engine_mutex);
  /// Returns the greatest depth of nested calls among the running requests.
  std::uint32_t deepest() const REQUIRES(engine_mutex);
  void describe(Snapshot& out) const REQUIRES(engine_mutex);  // snapshot.cc

  void abandon_in_child() REQUIRES(engine_mutex) { idle_.clear(); }

 private:
  void finish_peer_event() REQUIRES(engine_mutex);
  std::deque<WorkItem>& queue_of(const WorkItem& request) REQUIRES(engine_mutex);

  EngineParts& parts_;
  const std::size_t handlers_;

  std::deque<WorkItem> urgent_ GUARDED_BY(engine_mutex);    // completions, one-way messages, events
  std::deque<WorkItem> deferred_ GUARDED_BY(engine_mutex);  // run when no other work is queued, or after a while
  std::atomic<bool> has_deferred_ = false;                  // hint, read without the mutex
  std::deque<WorkItem> nested_ GUARDED_BY(engine_mutex);
  std::deque<WorkItem> top_ GUARDED_BY(engine_mutex);
  std::map<std::uint64_t, std::deque<WorkItem>> held_ GUARDED_BY(engine_mutex);  // requests, by connection
  bool peer_event_running_ GUARDED_BY(engine_mutex) = false;  // a peer event is in `urgent_` or running
  std::deque<WorkItem> peer_events_ GUARDED_BY(engine_mutex);

  // One per thread; they outlive threads that do not leave.
  std::deque<RunningRequest> requests_of_threads_ GUARDED_BY(engine_mutex);
  std::vector<RunningRequest*> free_requests_ GUARDED_BY(engine_mutex);
  std::vector<PoolThread*> idle_ GUARDED_BY(engine_mutex);  // asleep on their parkers; most recent last
  std::size_t threads_ GUARDED_BY(engine_mutex) = 0;
  std::size_t running_ GUARDED_BY(engine_mutex) = 0;      // of these run an item,
  std::size_t running_top_ GUARDED_BY(engine_mutex) = 0;  // a top-level request,
  std::size_t running_requests_ GUARDED_BY(engine_mutex) = 0;
  std::size_t running_completions_ GUARDED_BY(engine_mutex) = 0;
  bool thread_starting_ GUARDED_BY(engine_mutex) = false;
  Nanos popped_at_ GUARDED_BY(engine_mutex) = 0;            // when a pool thread last took an item
  Nanos completion_taken_at_ GUARDED_BY(engine_mutex) = 0;  // when a pool thread last took a completion
  std::uint64_t requests_ GUARDED_BY(engine_mutex) = 0;
};

}  // namespace telegrad

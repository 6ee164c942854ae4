// The pending calls of an engine: how they are completed, and the threads that wait for them.
//
// Each call has exactly one completion. It goes to the thread that waits for the call, else to the wait set of the
// call, else to the pool if the call is asynchronous, else it stays with the call until a thread waits or gives up.
//
// A call may have an object that is kept alive until its reply has arrived, even after the call has ended without it,
// or until no reply can arrive any more.
//
// Wait sets. Completions go directly to the thread that waits for many calls. This saves a thread switch, and with it a
// handover of the GIL, per call.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread_safety.h"
#include "core/call_slab.h"
#include "core/connection.h"
#include "core/leader.h"
#include "core/work_item.h"

namespace telegrad {

struct EngineParts;
struct CallOptions;
struct Snapshot;

inline constexpr const char* kForked = "this process is a fork of its worker's, which cannot use its calls";
inline constexpr const char* kShutDown = "this worker has been shut down";

/// A call with a request on a connection.
struct SentCall {
  ConnectionPtr connection;
  std::uint64_t id;
};

class CallTable {
 public:
  explicit CallTable(EngineParts& parts) : parts_(parts) {}

  // ---- calls

  /// Opens a call with this request to a peer; takes the objects of the options.
  std::uint64_t open(std::int32_t peer, const FrameHeader& request, Nanos at, CallOptions& options)
      REQUIRES(engine_mutex);
  Call* find(std::uint64_t id) REQUIRES(engine_mutex) { return slab_.find(id); }
  /// Sets the deadline of an asynchronous call whose request has been sent, or queued to be sent; does nothing if the
  /// call has ended. Before that, an expired call would send a kCancel that overtakes its request.
  void set_deadline(std::uint64_t id, Nanos deadline) REQUIRES(engine_mutex);
  /// Records the connection that has the request of a call, or of a call that has ended.
  void set_connection(std::uint64_t id, std::uint64_t connection) REQUIRES(engine_mutex);
  /// Passes a completion to the waiting thread, to a wait set, or to the pool.
  void complete(std::uint64_t id, Completion&& completion, Released& released) REQUIRES(engine_mutex);
  /// Releases what a call keeps alive, because no late reply can arrive.
  void release_keep_alive(std::uint64_t id, Released& released) REQUIRES(engine_mutex);
  /// Completes all calls with a request on a connection, which has closed.
  void fail_calls_of(std::uint64_t connection, CallStatus status, const LinkError& why, Released& released)
      REQUIRES(engine_mutex);
  /// Completes all calls, because the engine stops, and releases what ended ones keep alive (separately, afterwards).
  void stop_all(Released& released) REQUIRES(engine_mutex);
  void release_keep_alives(Released& released) REQUIRES(engine_mutex);
  /// Ends the grace of calls, or begins it for calls with a deadline before `at`: `expired` are those of which the
  /// callees are to be asked with `send_cancel`.
  void expire(Nanos at, Released& released, std::vector<SentCall>& expired) REQUIRES(engine_mutex);
  Nanos next_deadline() const REQUIRES(engine_mutex) { return slab_.next_deadline(); }

  // ---- cancellation and deadlines (call_table_cancel.cc)

  /// See the functions of the engine.
  bool cancel(std::uint64_t id, WorkItem& taken, const std::function<void()>& before_blocking) EXCLUDES(engine_mutex);
  WaitEnd expire(std::uint64_t id, const std::function<bool()>& interrupted, Completion& out) EXCLUDES(engine_mutex);
  void expire_soon(std::uint64_t id) EXCLUDES(engine_mutex);
  /// Notifies the callee that a call has ended.
  void send_cancel(const SentCall& call, CancelReason reason, const std::function<void()>& before_blocking)
      EXCLUDES(engine_mutex);
  /// Completes an expired call with the state that its callee reports. Leader only.
  void on_state(const Connection& c, std::uint64_t id, CallState state) EXCLUDES(engine_mutex);

  // ---- replies. Leader only.

  /// Queues a reply of the read in progress. `frees_request`: callers may wait until the peer admits one more request.
  void add_reply(Incoming&& m, bool frees_request) {
    unprocessed_replies_.push_back(std::move(m));
    frees_request_ = frees_request_ || frees_request;
  }
  /// Processes the queued replies under one lock.
  void process_replies(const ConnectionPtr& c) EXCLUDES(engine_mutex) {
    if (!unprocessed_replies_.empty()) complete_replies(c);
  }

  // ---- waiting: see the functions of the engine

  WaitEnd wait(std::uint64_t id, Nanos deadline, const std::function<bool()>& interrupted, Completion& out)
      EXCLUDES(engine_mutex);
  void give_up(std::uint64_t id) EXCLUDES(engine_mutex);
  bool add_wait_set(WaitSet& set) EXCLUDES(engine_mutex);
  WaitEnd wait(WaitSet& set, const std::function<bool()>& interrupted, std::deque<WorkItem>& out)
      EXCLUDES(engine_mutex);
  void notify_wait_sets() EXCLUDES(engine_mutex);
  void remove_wait_set(WaitSet& set, std::deque<WorkItem>& left) EXCLUDES(engine_mutex);

  // ---- state

  std::size_t size() const REQUIRES(engine_mutex) { return slab_.size(); }
  /// See `Engine::snapshot`; in snapshot.cc.
  void describe(Snapshot& out, const std::function<void(std::uint64_t, const KeepAlive&)>& on_target)
      REQUIRES(engine_mutex);
  /// Returns the number of asynchronous calls for which a thread may be waiting.
  std::size_t waiting_async() const REQUIRES(engine_mutex) { return slab_.waiting_async(); }
  std::uint64_t replies() const REQUIRES(engine_mutex) { return replies_; }

  void abandon_in_child() REQUIRES(engine_mutex);

 private:
  struct KeptAlive {
    std::uint64_t connection;
    std::unique_ptr<KeepAlive> owner;
  };

  ConnectionPtr begin_grace(std::uint64_t id, Released& released) REQUIRES(engine_mutex);
  void complete_late(std::uint64_t id, Incoming&& reply, Released& released) REQUIRES(engine_mutex);
  WorkItem end_async(std::uint64_t id, Completion&& completion, Released& released) REQUIRES(engine_mutex);
  void complete_replies(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  void close_call(std::uint64_t id, bool replied, Released& released) REQUIRES(engine_mutex);
  void orphan(std::int32_t peer, std::uint64_t connection, Incoming&& m) REQUIRES(engine_mutex);
  void on_reply(const ConnectionPtr& c, Incoming&& m, Released& released) REQUIRES(engine_mutex);

  EngineParts& parts_;
  CallSlab slab_ GUARDED_BY(engine_mutex);
  std::unordered_map<std::uint64_t, KeptAlive> keep_alives_ GUARDED_BY(engine_mutex);  // by id of a call that has ended
  std::vector<WaitSet*> wait_sets_ GUARDED_BY(engine_mutex);
  std::uint64_t replies_ GUARDED_BY(engine_mutex) = 0;
  std::vector<Incoming> unprocessed_replies_;  // leader only
  bool frees_request_ = false;                 // leader only
};

}  // namespace telegrad

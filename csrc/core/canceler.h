// Cancellation of requests at their callee.
//
// A caller cancels a request with a frame (kCancel), and all of its requests by losing its connection. The request ends
// in one of three ways:
//     queued    its content is left out (core/left_out.h), and it moves to the queue that no handler limits; the layer
//               above processes its trailer and replies
//     running   on a thread of the pool: `is_canceled` returns true, for the handler to ask
//     detached  without a thread, parked or with a deferred result: `is_canceled` too; if its result is deferred, a
//               work item of kind kCancel notifies the layer above
// A request with kMustRun is not canceled. A queued request without a trailer that must be delivered runs, too
// (`may_leave_out`). Every request gets its reply, canceled or not.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/thread_safety.h"
#include "core/connection.h"
#include "core/message.h"
#include "core/work_item.h"

namespace telegrad {

struct EngineParts;
struct RequestSnapshot;
struct RunningRequest;
struct Snapshot;

class Canceler {
 public:
  explicit Canceler(EngineParts& parts) : parts_(parts) {}

  // ---- frames. Leader only.

  /// Queues a kCancel of the read in progress.
  void add(const FrameHeader& cancel) { reasons_.emplace(cancel.call_id, static_cast<CancelReason>(cancel.tag)); }
  /// Cancels the requests of the queued frames in one pass over the work queue, and replies with their states.
  void process(const ConnectionPtr& c) EXCLUDES(engine_mutex) {
    if (!reasons_.empty()) [[unlikely]]
      cancel_requests(c);
  }

  // ---- requests

  /// Cancels all requests of a connection, which has closed.
  void cancel_requests_of(std::uint64_t connection) REQUIRES(engine_mutex);
  /// Records that a request has no thread, because it waits for its inputs.
  void park(const WorkItem& request) EXCLUDES(engine_mutex);
  /// Records that a request has no thread, because it waits for its inputs or its result is deferred (`deferred`), or
  /// that it runs again. Returns whether it has been canceled.
  bool detach(std::uint64_t connection, std::uint64_t call, bool deferred) EXCLUDES(engine_mutex);
  /// Returns whether a request that has not been answered has been canceled.
  bool is_canceled(std::uint64_t connection, std::uint64_t call) const EXCLUDES(engine_mutex);
  /// Records that the handler of a request has seen that its deadline has passed. It may return early, so its reply is
  /// no result, even if it arrives before the caller has noticed the deadline.
  void mark_late(std::uint64_t connection, std::uint64_t call) EXCLUDES(engine_mutex);
  /// Forgets a request, which the calling thread answers. Returns whether it is late.
  bool on_reply(std::uint64_t connection, std::uint64_t call) REQUIRES(engine_mutex);
  /// Returns the number of detached requests.
  std::size_t detached() const REQUIRES(engine_mutex) { return detached_.size(); }
  /// Returns how many of them wait for their inputs.
  std::size_t parked() const REQUIRES(engine_mutex) { return parked_; }
  void describe(Snapshot& out) const REQUIRES(engine_mutex);  // snapshot.cc
  /// Returns nothing if the request is not detached.
  std::optional<RequestSnapshot> find(std::uint64_t connection, std::uint64_t call) const REQUIRES(engine_mutex);

 private:
  struct Detached {
    bool deferred = false;
    bool canceled = false;
    bool must_run = false;  // kMustRun: it cannot be canceled
    bool late = false;
    std::int32_t peer = -1;
    Nanos since = 0;                   // when a thread took it
    std::shared_ptr<const Name> name;  // of the function, if it is parked
  };
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // connection, call

  static RequestSnapshot describe(const Key& key, const Detached& request);
  void cancel_requests(const ConnectionPtr& c) EXCLUDES(engine_mutex);
  Detached& detach(const Key& key, bool deferred) REQUIRES(engine_mutex);
  CallState cancel_started(const Key& key) REQUIRES(engine_mutex);
  void cancel_detached(const Key& key, Detached& request) REQUIRES(engine_mutex);

  EngineParts& parts_;
  std::unordered_map<std::uint64_t, CancelReason> reasons_;  // by call; leader only
  std::map<Key, Detached> detached_ GUARDED_BY(engine_mutex);
  std::size_t parked_ GUARDED_BY(engine_mutex) = 0;
};

/// Makes a kCancel, or a kCallState (then `tag` is a CallState).
std::unique_ptr<Outgoing> cancel_frame(FrameType type, std::uint64_t call, std::uint8_t tag);

}  // namespace telegrad

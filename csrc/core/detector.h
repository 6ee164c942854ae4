// The failure detector: ends the sessions of peers that are silent (core/silence.h), so that nothing waits for a peer
// that is stopped, cut off or switched off. The kernel reports the end of a process on this host; it does not report
// these. The group counts on each of its members, so every open connection is observed.
//
// The timer runs the detector, without Python: pings are sent and answered while user code holds the GIL. If no thread
// reads the links, because user code has all of them, the timer thread reads them (Leader::read_for_timer).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/thread_safety.h"
#include "core/connection.h"

namespace telegrad {

struct EngineParts;

class Detector {
 public:
  explicit Detector(EngineParts& parts) : parts_(parts) {}

  /// Prepares the observation of a new connection.
  void add(Connection& c) REQUIRES(engine_mutex);
  /// Continues the observation of a session on another connection. The link sends unanswered pings again.
  void resume(Connection& c) REQUIRES(engine_mutex);

  /// Actions to take while the mutex is not held.
  struct Findings {
    std::vector<ConnectionPtr> silent;                  // to be sent a ping
    std::vector<ConnectionPtr> overdue;                 // to get another connection, if their session allows it
    std::vector<std::pair<ConnectionPtr, Nanos>> lost;  // and for how long they have been silent
    bool must_read = false;                             // the links
  };
  /// Checks all connections if it is time. Arms the timer.
  Findings on_timer(Nanos at) REQUIRES(engine_mutex);
  void act(const Findings& findings) EXCLUDES(engine_mutex);
  /// Returns when a peer is lost to which no connection has been possible since `since`, but not before `earliest`.
  Nanos time_of_loss(Nanos since, Nanos earliest) const;

 private:
  void observe(Connection& c) REQUIRES(engine_mutex);

  EngineParts& parts_;
  Nanos next_ GUARDED_BY(engine_mutex) = kNever;
};

}  // namespace telegrad

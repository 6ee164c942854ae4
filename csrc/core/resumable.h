// A link that outlives its connection: see transports/tcp/resumable_link.h and core/peers_resume.cc.
//
// The caller has the connection's send_mutex and is the receiving thread, so that no other thread sends or receives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/message.h"
#include "core/tuning.h"

namespace telegrad {

class Link;

class Resumable {
 public:
  virtual ~Resumable() = default;

  /// Begins to count messages, and to keep those that the other end has not acknowledged. Called at both ends once the
  /// handshake has ended.
  virtual void keep() = 0;

  /// Returns whether the link may continue on another connection. Not if the other end has broken the protocol, or if
  /// `keep` was not called. Any thread.
  virtual bool may_resume() const = 0;

  /// Closes the connection. Until `resume`, the link blocks all messages and receives none. Returns how many messages
  /// have arrived.
  virtual std::uint64_t suspend() = 0;

  /// Continues on the connection of another link to the same end, which receives nothing more. `received`: how many
  /// messages have arrived at the other end. Returns false if this end has not kept the rest.
  virtual bool resume(Link& connection, std::uint64_t received) = 0;

  /// Stops using the memory of a request, because its call has ended without a reply. Any thread.
  virtual void release(std::uint64_t call, Released& released) = 0;

  /// Returns whether messages are kept with memory that may have changed since they were sent. They are not sent again
  /// before `verify` or `give_up_verifying`. Any thread.
  virtual bool has_unverified() const = 0;

  /// Copies these messages and asks their owners whether their memory is unchanged (KeepAlive::is_unchanged). If so,
  /// the copies are sent again, else messages without content. May block; any thread that holds no lock of the core.
  virtual void verify() = 0;

  /// Sends messages without content instead of those with owners that have not answered. Returns whether others are
  /// still being copied. Any thread.
  virtual bool give_up_verifying() = 0;

  /// Messages for which no acknowledgement has arrived. Any thread.
  struct Waiting {
    std::uint64_t first = 0;  // number of the oldest
    bool any = false;
    std::size_t bytes = 0;  // of their copies
  };
  virtual Waiting waiting() const = 0;
};

}  // namespace telegrad

// Options of `Engine::start`.
#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"
#include "core/message.h"

namespace telegrad {

struct CallOptions {
  Nanos deadline = kNever;
  bool nested = false;      // made inside a handler: exempt from the window, and always finds a thread
  std::uint32_t depth = 0;  // of nested calls: one more than that of the handler's own request
  bool background = false;  // no thread waits for the completion: links may go unread for it for kMaxHandoffDelay, and
                            // a request that must be sent waits for a connection until the peer is lost. Never canceled
  bool deferrable = false;  // background, and the completion runs no user code: it may stay queued for kDeferDelay, and
                            // `take_deferred` may return it
  bool polled = false;      // a thread will soon wait: links may go unread for the completion for kMaxHandoffDelay
  bool never_wait = false;  // wait neither for the window nor for the socket: unsent bytes are copied
  bool waits = false;       // this thread waits for the reply, and the message does not change meanwhile
  std::function<bool()> interrupted;      // polled while `start` waits; true ends the wait
  std::function<void()> before_blocking;  // called before `start` waits for another thread that sends to the same peer
  std::unique_ptr<KeepAlive> target;      // if set, the completion goes to the pool unless a thread waits for it
  std::unique_ptr<KeepAlive> keep_alive;  // kept until the reply has arrived, even a late one, or the peer is lost
};

}  // namespace telegrad

// A link to a peer, with the engine's state for it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/handshake.h"
#include "core/silence.h"
#include "core/transport.h"

namespace telegrad {

/// A name to which a peer has given an id on one connection. In `handle` the layer above caches an object made from the
/// text; it is written under that layer's own lock and destroyed with the name.
struct Name {
  std::string text;
  mutable std::shared_ptr<void> handle;
};

/// Detects bursts: messages that each follow the last one at once.
class BurstDetector {
 public:
  /// Records a message and returns whether it belongs to a burst that has lasted for a while.
  bool in_burst(Nanos at) {
    length_ = at - last_ < kMaxGap ? length_ + 1 : 0;
    last_ = at;
    return length_ >= kMinLength;
  }

 private:
  static constexpr Nanos kMaxGap = 20 * kMicrosecond;
  static constexpr int kMinLength = 16;
  Nanos last_ = 0;
  int length_ = 0;
};

struct Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

struct Connection {
  enum class State { kHandshaking, kOpen, kClosed };

  Connection(std::uint64_t id, std::unique_ptr<Link> link, Handshake handshake, bool initiator)
      : id(id), link(std::move(link)), handshake(std::move(handshake)), initiator(initiator) {}

  const std::uint64_t id;
  const std::unique_ptr<Link> link;
  std::atomic<State> state = State::kHandshaking;

  // Leader only.
  bool busy_polled = false;  // see Link::enable_busy_poll
  Handshake handshake;
  const bool initiator;
  bool has_asked_for_lanes = false;
  bool user_checked = false;          // `Engine::objection` has checked the peer that this end connected to
  std::atomic<bool> goodbye = false;  // the peer has announced its end
  std::unordered_map<std::uint32_t, std::shared_ptr<const Name>> names;

  std::atomic<OfferAnswer> answer = OfferAnswer::kAccept;  // of the acceptor, if it has refused this connection

  // Written once, before the state becomes kOpen.
  std::int32_t peer = -1;
  Limits limits;  // of messages to the peer

  // Under the engine's mutex.
  Nanos handshake_deadline = kNever;
  std::string source;                   // see Link::source; of accepted connections
  std::atomic<bool> displaced = false;  // to be closed, because too many others have been accepted
  bool timed_out = false;               // it has missed `handshake_deadline`
  bool was_open = false;                // it has been a connection to `peer`, whatever the state is now
  bool superseded = false;              // another connection is, or becomes, the session
  Silence silence{0};                   // of the peer
  ConnectionPtr lane_of;                // connection for which this end has initiated a lane

  // Sending, under send_mutex. Messages are sent in the order of the queue; `flushed` counts those sent.
  std::mutex send_mutex;
  std::deque<std::unique_ptr<Outgoing>> queue;
  std::vector<bool> names_sent;
  bool watching_writable = false;
  BurstDetector burst;       // of asynchronous requests
  std::size_t buffered = 0;  // messages in the link's buffer
  bool coalescing = false;   // it is in the engine's list of such connections
  std::uint64_t queued = 0;
  std::atomic<std::uint64_t> flushed = 0;
  std::atomic<std::uint64_t> progress = 0;  // grows whenever the link sends more of the queue
  std::atomic<bool> stalled = false;        // the peer has not read for a while: no thread waits for it

  // Flow control: request bytes sent that the peer has not processed; bytes processed but not yet reported to the peer.
  std::atomic<std::int64_t> outstanding = 0;
  std::atomic<std::int64_t> credit_due = 0;
  std::atomic<std::int64_t> over_window = 0;          // request bytes sent without waiting since the window closed
  std::atomic<bool> window_warning_logged = false;    // a warning about these has been logged
  std::atomic<bool> window_sent = false;              // the peer knows this worker's window
  std::atomic<std::int64_t> peer_window = INT64_MAX;  // the peer's own window, if the peer has had to wait
};

/// State of a message that waits for a connection. Under the engine's mutex.
struct PendingSend {
  std::shared_ptr<Connection> connection;  // in the queue of this connection
  std::uint64_t ticket = 0;
  bool done = false;     // sent or dropped
  bool expired = false;  // its call has stopped waiting for a connection, but the message is still to be sent
};

}  // namespace telegrad

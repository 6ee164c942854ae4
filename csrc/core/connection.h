// A link to a peer, with the engine's state for it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread_safety.h"
#include "core/delivery_order.h"
#include "core/handshake.h"
#include "core/request_bytes.h"
#include "core/resumption.h"
#include "core/silence.h"
#include "core/transport.h"
#include "core/tuning.h"

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
    length_ = at - last_ < kMaxBurstGap ? length_ + 1 : 0;
    last_ = at;
    return length_ >= kMinBurst;
  }

 private:
  Nanos last_ = 0;
  int length_ = 0;
};

/// Messages that wait for a link, sent in their order. The connection's send_mutex guards all but `flushed`.
struct SendQueue {
  struct Entry {
    std::unique_ptr<Outgoing> message;
    std::uint64_t number;  // counted over both queues of the connection
  };
  std::deque<Entry> entries;
  std::uint64_t queued = 0;                // messages that have been queued,
  std::atomic<std::uint64_t> flushed = 0;  // and sent

  bool empty() const { return entries.empty(); }
  Outgoing& front() const { return *entries.front().message; }
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
  bool user_checked = false;          // `Peers::on_handshake` has checked the peer that this end connected to
  std::atomic<bool> goodbye = false;  // the peer has announced its end
  std::unordered_map<std::uint32_t, std::shared_ptr<const Name>> names;
  std::uint64_t name_bytes = 0;  // of their texts

  std::atomic<std::uint32_t> names_of_peer = 0;            // the number of `names`, for any thread
  std::atomic<OfferAnswer> answer = OfferAnswer::kAccept;  // of the acceptor, if it has refused this connection

  // Written once, before the state becomes kOpen.
  std::int32_t peer = -1;
  Limits limits;                         // of messages to the peer
  std::uint32_t max_in_flight = 0;       // requests without a reply that both ends admit,
  std::int64_t max_in_flight_bytes = 0;  // and their bytes
  bool resumes = false;                  // its session outlives the present connection of the link

  // Under the engine's mutex.
  Nanos handshake_deadline = kNever;
  std::string source;                   // see Link::source; of accepted connections
  std::atomic<bool> displaced = false;  // to be closed, because too many others have been accepted
  bool timed_out = false;               // it has missed `handshake_deadline`
  bool was_open = false;                // it has been a connection to `peer`, whatever the state is now
  bool superseded = false;              // another connection is, or becomes, the session
  Silence silence{0};                   // of the peer
  ConnectionPtr lane_of;                // connection for which this end has initiated a lane
  bool is_local = false;                // the peer is a process of this host
  RequestBytes in_flight_bytes;         // of requests to the peer without a reply,
  RequestBytes unanswered_bytes;        // and of requests of the peer

  // See peers_resume.cc.
  Resumption resumption;
  LinkError broken;             // why the link's connection has broken, if it is suspended
  Nanos attempt_at = kNever;    // when to try again
  bool dialing = false;         // an attempt begins: `next_link` is about to be set
  ConnectionPtr next_link;      // the attempt under way
  Nanos verify_until = kNever;  // when messages that have not been verified are given up
  ConnectionPtr continues;      // of an attempt: the session

  // Sending.
  Mutex send_mutex;
  std::atomic<int> waiting_senders = 0;  // threads that wait for send_mutex
  SendQueue queue GUARDED_BY(send_mutex);
  SendQueue overtaking GUARDED_BY(send_mutex);  // messages that overtake a large one in `queue`
  std::uint64_t next_entry GUARDED_BY(send_mutex) = 0;
  std::size_t queued_large GUARDED_BY(send_mutex) = 0;  // large messages in `queue`
  DeliveryOrder order GUARDED_BY(send_mutex);           // of the messages in `queue`
  std::vector<bool> names_sent GUARDED_BY(send_mutex);
  std::uint64_t name_bytes_sent GUARDED_BY(send_mutex) = 0;  // of their texts
  bool watching_writable GUARDED_BY(send_mutex) = false;
  BurstDetector burst GUARDED_BY(send_mutex);       // of asynchronous requests
  std::size_t buffered GUARDED_BY(send_mutex) = 0;  // messages in the link's buffer
  bool coalescing GUARDED_BY(send_mutex) = false;   // it is in the engine's list of such connections
  bool overfull GUARDED_BY(send_mutex) = false;     // to be closed, because far too much is queued for the peer

  // Changed by a thread with the send_mutex, read by any.
  std::atomic<std::uint32_t> names_defined = 0;  // the number of names sent
  std::atomic<std::uint64_t> progress = 0;       // grows whenever the link becomes writable; leader only
  std::atomic<std::int64_t> unsent_replies = 0;  // bytes of replies in the queues,
  std::atomic<std::int64_t> large_reply = 0;     // and of the large one that is being sent
  std::atomic<std::int64_t> kept_bytes = 0;      // of messages in the queues that no thread waits for,
  std::atomic<std::int64_t> forced_bytes = 0;    // and of those among them that were not admitted
  std::atomic<bool> stalled = false;             // the peer has not read for a while: no thread waits for it

  // Flow control: request bytes sent that the peer has not processed; bytes processed but not yet reported to the peer.
  std::atomic<std::int64_t> outstanding = 0;
  std::atomic<std::int64_t> large_unsent = 0;  // part of `outstanding`: of large requests not sent completely
  std::atomic<std::int64_t> in_flight = 0;     // requests sent that the peer has not answered
  std::atomic<std::int64_t> unanswered = 0;    // requests of the peer that this worker has not answered
  std::atomic<std::int64_t> credit_due = 0;
  std::atomic<std::int64_t> over_window = 0;          // request bytes sent without waiting since the window closed
  std::atomic<bool> window_warning_logged = false;    // a warning about these has been logged
  std::atomic<bool> window_sent = false;              // the peer knows this worker's window
  std::atomic<std::int64_t> peer_window = INT64_MAX;  // the peer's own window, if the peer has had to wait
};

/// State of a message that waits for a connection. Under the engine's mutex.
struct PendingSend {
  std::shared_ptr<Connection> connection;
  SendQueue* queue = nullptr;  // in this queue of the connection
  std::uint64_t ticket = 0;
  bool done = false;     // sent or dropped
  bool expired = false;  // its call has stopped waiting for a connection, but the message is still to be sent
};

}  // namespace telegrad

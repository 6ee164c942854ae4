// One link to a peer, with what the engine keeps for it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/handshake.h"
#include "core/transport.h"

namespace telegrad {

/// A name that a peer has given an id on one connection. `handle` is a place for the layer above to keep what it made
/// of the text; it is written under that layer's own lock and destroyed with the name.
struct Name {
  std::string text;
  mutable std::shared_ptr<void> handle;
};

/// Tells a burst of messages, each following the last at once, from single ones.
class Burst {
 public:
  /// Is the message at hand one of a burst that has gone on for a while?
  bool goes_on(Nanos at) {
    length_ = at - last_ < kAtOnce ? length_ + 1 : 0;
    last_ = at;
    return length_ >= kLong;
  }

 private:
  static constexpr Nanos kAtOnce = 20 * kMicrosecond;
  static constexpr int kLong = 16;
  Nanos last_ = 0;
  int length_ = 0;
};

struct Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

struct Connection {
  enum class State { kHandshaking, kOpen, kDead };

  Connection(std::uint64_t id, std::unique_ptr<Link> link, Handshake handshake, bool initiator)
      : id(id), link(std::move(link)), handshake(std::move(handshake)), initiator(initiator) {}

  const std::uint64_t id;
  const std::unique_ptr<Link> link;
  std::atomic<State> state = State::kHandshaking;

  // The polling thread's.
  bool awake = false;  // see Link::stay_awake
  Handshake handshake;
  const bool initiator;
  bool has_asked_for_lanes = false;
  bool vetted = false;                // `Engine::objection` has checked the peer that this end dialed
  std::atomic<bool> goodbye = false;  // the peer has said that it ends
  std::unordered_map<std::uint32_t, std::shared_ptr<const Name>> names;

  // Written once, before the state becomes kOpen.
  std::int32_t peer = -1;
  Limits limits;  // of what the peer takes

  // Under the engine's mutex.
  Nanos handshake_deadline = kNever;
  std::string source;                   // see Link::source; of what has been accepted
  std::atomic<bool> displaced = false;  // it must go, since too many others have come
  bool late = false;                    // it has not met that
  bool opened = false;                  // it has been a link to `peer`, whatever the state is now
  ConnectionPtr lane_of;                // what an initiated lane is for

  // Sending, under send_mutex. Messages leave in the order of the queue; `flushed` counts those that have left.
  std::mutex send_mutex;
  std::deque<std::unique_ptr<Outgoing>> queue;
  std::vector<bool> names_sent;
  bool watching_writable = false;
  Burst burst;             // of asynchronous requests
  std::size_t held = 0;    // messages that the link holds
  bool gathering = false;  // the engine knows of them
  std::uint64_t queued = 0;
  std::atomic<std::uint64_t> flushed = 0;
  std::atomic<std::uint64_t> progress = 0;  // grows whenever the link takes more of the queue
  std::atomic<bool> stalled = false;        // the peer has not read for a while: nobody waits for it to

  // Flow control: request bytes that we sent and the peer has not taken up; that we took up and have not told.
  std::atomic<std::int64_t> outstanding = 0;
  std::atomic<std::int64_t> credit_due = 0;
  std::atomic<std::int64_t> past_window = 0;  // request bytes sent since the window closed, by those who do not wait
  std::atomic<bool> told_of_window = false;   // and it has been said that they are many
  std::atomic<bool> window_known = false;     // the peer knows our window,
  std::atomic<std::int64_t> peer_window = INT64_MAX;  // and we its own, if it has had to wait
};

/// What became of a message that was kept until there was a link. Under the engine's mutex.
struct Departure {
  std::shared_ptr<Connection> via;  // it is in this link's queue
  std::uint64_t ticket = 0;
  bool gone = false;  // it has left, or been dropped
  bool late = false;  // its call has waited for a link long enough; it waits on by itself
};

}  // namespace telegrad

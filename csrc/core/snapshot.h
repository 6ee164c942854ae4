// What an engine is doing at one moment: calls, requests, sessions and connections.
//
// It is read from what the parts keep for their work. A call and a request keep no more for it than the time at which
// they began, which their path reads anyway.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"

namespace telegrad {

/// A call of this worker without a reply.
struct CallSnapshot {
  std::uint64_t id = 0;
  std::int32_t peer = -1;
  std::uint32_t name_id = 0;     // of the function; 0: none
  std::uint64_t connection = 0;  // that has the request; 0: it waits for a connection, or for the peer's window
  Nanos since = 0;
};

/// A request of a peer without a reply.
struct RequestSnapshot {
  enum class State : std::uint8_t { kQueued, kRunning, kParked, kDeferred };

  std::uint64_t connection = 0;
  std::uint64_t call = 0;
  std::int32_t peer = -1;
  State state{};
  Nanos since = 0;          // when it was queued, or when a thread took it
  Nanos deadline = kNever;  // if queued
  std::string name;         // of the function, if queued or parked
};

/// A peer and the session with it.
struct PeerSnapshot {
  std::int32_t id = -1;
  std::string name;
  std::uint64_t incarnation = 0;  // the newest known
  std::uint64_t connection = 0;   // that carries the session; 0: none is open
  std::int64_t epoch = 0;         // of the messages that the layer above makes now
  bool connecting = false;
  std::size_t pending = 0;  // messages that wait for a connection
  std::string last_error;   // of the last attempt to connect, or why the peer was removed
};

/// A connection, open or in its handshake.
struct ConnectionSnapshot {
  std::uint64_t id = 0;
  std::int32_t peer = -1;  // -1: not known yet
  bool open = false;
  bool initiator = false;
  bool stalled = false;          // the peer has not read for a while
  std::string address;           // as the transport describes it
  std::string source;            // of an accepted connection
  std::size_t lanes = 0;         // additional connections
  std::int64_t unprocessed = 0;  // bytes of requests that the peer has not started to process
};

/// A limit of what the worker keeps at the same time.
struct LimitSnapshot {
  std::string option;      // that sets it
  std::uint64_t used = 0;  // of the peer that uses most, if the limit is per peer
  std::uint64_t limit = 0;
  std::uint64_t refused = 0;  // how often a message or a growth was refused
};

struct Snapshot {
  Nanos at = 0;
  std::vector<CallSnapshot> calls;
  std::vector<RequestSnapshot> requests;
  std::vector<PeerSnapshot> peers;
  std::vector<ConnectionSnapshot> connections;
  std::vector<LimitSnapshot> limits;
};

}  // namespace telegrad

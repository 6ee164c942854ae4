// Settings of one engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "core/faults.h"
#include "core/handshake.h"
#include "core/limits.h"
#include "core/transport.h"

namespace telegrad {

struct Settings {
  HandshakeConfig handshake;
  Nanos spin = 50 * kMicrosecond;  // how long a waiting thread polls before it sleeps
  std::size_t handlers = 16;       // top-level requests that run at the same time
  std::int64_t window = 64 << 20;  // request bytes that a peer may have waiting at this worker
  std::size_t pool_cache = std::size_t{1} << 30;
  Nanos handshake_timeout = 10 * kSecond;
  Nanos connect_timeout = 30 * kSecond;  // how long a call may wait for a connection; 0: without limit
  LinkSecurityPtr security;              // null: connections are not encrypted
  Nanos heartbeat = 5 * kSecond;         // interval of the failure detector, see core/silence.h; 0: none. On TCP,
  Nanos local_heartbeat = 30 * kSecond;  // and on connections within the host, where debuggers stop processes
  LoadLimits load;                       // see core/overload.h
  FaultsPtr faults;                      // for tests; null: none
  bool check_uid = true;                 // reject peers on this host that run as another user
};

struct PeerAddress {
  Identity identity;
  std::vector<std::string> addresses;  // in the order to try them
};

}  // namespace telegrad

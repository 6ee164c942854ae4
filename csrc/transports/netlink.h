// Requests to the kernel over netlink. A socket stays open, so requests need no new descriptor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transports/descriptor.h"

namespace telegrad {

/// One netlink socket. One thread at a time.
class Netlink {
 public:
  struct Answer {
    int error = 0;           // an errno; 0: there is an answer
    std::uint16_t type = 0;  // of the first message of it
    std::string_view body;   // of that; valid until the next request
  };

  /// Opens the socket of a netlink family (NETLINK_ROUTE, ...). Never throws: without a socket each request fails.
  explicit Netlink(int family);

  /// Sends a request of a type, with flags besides NLM_F_REQUEST, and returns the answer. The kernel answers before the
  /// request returns, so this never waits.
  Answer ask(std::uint16_t type, std::uint16_t flags, std::string_view request);

  void close() { socket_ = Descriptor(); }

 private:
  Descriptor socket_;
  int error_ = 0;  // why there is no socket
  std::uint32_t sequence_ = 0;
  std::vector<std::uint32_t> buffer_;  // words: netlink messages are aligned to four bytes
};

}  // namespace telegrad

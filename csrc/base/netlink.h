// Requests to the kernel over netlink. The socket stays open, so a request needs no new descriptor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace telegrad {

/// A netlink socket. One thread at a time.
class Netlink {
 public:
  struct Answer {
    int error = 0;           // an errno; 0: success
    std::uint16_t type = 0;  // of the first message of the answer
    std::string_view body;   // of that message; valid until the next request
  };

  /// Opens the socket of a netlink family (NETLINK_ROUTE, ...). Never throws: without a socket, every request fails.
  explicit Netlink(int family);

  /// Sends a request with flags in addition to NLM_F_REQUEST and returns the answer. Never blocks: the kernel answers
  /// before the send returns.
  Answer ask(std::uint16_t type, std::uint16_t flags, std::string_view request);

  void close() { socket_ = UniqueFd(); }

 private:
  UniqueFd socket_;
  int error_ = 0;  // why there is no socket
  std::uint32_t sequence_ = 0;
  std::vector<std::uint32_t> buffer_;  // words: netlink messages are aligned to four bytes
};

}  // namespace telegrad

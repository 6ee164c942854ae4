// The user of the process at the other end of a TCP connection that does not leave this host. The kernel does not vouch
// for it as it does on a Unix socket, but it knows the sockets of its network namespace with their users.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/transport.h"
#include "transports/descriptor.h"
#include "transports/netlink.h"

struct sockaddr_storage;

namespace telegrad {

/// One end of a TCP connection; IPv4 addresses as ::ffff:a.b.c.d.
struct TcpEnd {
  std::array<std::uint8_t, 16> ip{};
  std::uint16_t port = 0;
  std::uint32_t interface = 0;  // of a link-local address
  bool is_v4() const;
  bool same_as(const TcpEnd& other) const { return ip == other.ip && port == other.port; }
};

/// Null when it is not an IP address.
std::optional<TcpEnd> tcp_end(const sockaddr_storage& address);

/// The owner of the socket that is bound to `local` and connected to `remote`, out of a table as /proc/net/tcp and
/// /proc/net/tcp6 are. Null when it is not there.
struct SocketOwner {
  uid_t uid;
  std::uint64_t inode;  // 0: no process has the socket any more, and the user means nothing
};
std::optional<SocketOwner> owner_in_table(std::string_view table, const TcpEnd& local, const TcpEnd& remote);

/// Finds the users of TCP peers. Asks the kernel over sock_diag, or reads /proc where the kernel has no sock_diag.
/// Everything that takes a descriptor is opened at first, so peers are told apart when the process has no descriptor
/// left. One thread at a time.
class UserLookup {
 public:
  /// `over_netlink`: false for the tests of the other way.
  explicit UserLookup(bool over_netlink = true);
  /// The user at the other end of a connected TCP socket.
  PeerUser of_tcp_peer(int fd);
  void close();

 private:
  std::optional<SocketOwner> find(const TcpEnd& local, const TcpEnd& remote);
  std::optional<bool> is_of_this_host(const sockaddr_storage& address, const TcpEnd& end);

  Netlink sockets_, routes_;
  Descriptor tables_[2];  // in place of `sockets_`
};

}  // namespace telegrad

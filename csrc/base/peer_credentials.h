// User of the process at the other end of a TCP connection within this host. TCP does not pass credentials as Unix
// sockets do, but the kernel lists the sockets of its network namespace with their users.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/netlink.h"
#include "base/unique_fd.h"

struct sockaddr_storage;

namespace telegrad {

/// Id of no user.
inline constexpr auto kNoUser = static_cast<uid_t>(-1);

/// User that runs the process at the other end of a link.
struct PeerCredentials {
  enum class Kind {
    kRemote,   // the process is on another host, or in another network namespace of this one
    kUser,     // the process is on this host, and `uid` is its user
    kUnknown,  // the process may be on this host, and the kernel does not report its user
  };
  Kind kind;
  uid_t uid = kNoUser;
  std::string why = {};  // kUnknown: the reason; "" if the process has closed its end
};

/// Address of one end of a TCP connection; IPv4 addresses as ::ffff:a.b.c.d.
struct TcpEnd {
  std::array<std::uint8_t, 16> ip{};
  std::uint16_t port = 0;
  std::uint32_t interface = 0;  // scope id of a link-local address
  bool is_v4() const;
  bool same_as(const TcpEnd& other) const { return ip == other.ip && port == other.port; }
};

/// Converts a socket address; null if it is not an IP address.
std::optional<TcpEnd> tcp_end(const sockaddr_storage& address);

/// Finds the owner of the socket that is bound to `local` and connected to `remote` in a table with the format of
/// /proc/net/tcp and /proc/net/tcp6. Null if the table does not list it.
struct SocketOwner {
  uid_t uid;
  std::uint64_t inode;  // 0: no process has the socket any more, and the user is meaningless
};
std::optional<SocketOwner> owner_in_table(std::string_view table, const TcpEnd& local, const TcpEnd& remote);

/// Finder of the users of TCP peers. Asks the kernel over sock_diag, or reads /proc if the kernel has no sock_diag.
/// Opens all its descriptors in the constructor, so it also works when the process has no descriptor left. One thread
/// at a time.
class CredentialLookup {
 public:
  /// `over_netlink`: false for tests of the fallback.
  explicit CredentialLookup(bool over_netlink = true);
  /// Returns the user at the other end of a connected TCP socket.
  PeerCredentials of_tcp_peer(int fd);
  void close();

 private:
  std::optional<SocketOwner> find(const TcpEnd& local, const TcpEnd& remote);
  std::optional<bool> is_of_this_host(const sockaddr_storage& address, const TcpEnd& end);

  Netlink sockets_, routes_;
  UniqueFd tables_[2];  // used instead of `sockets_`
};

}  // namespace telegrad

// Whose process is at the other end of a TCP connection that does not leave this host. The kernel does not vouch for it
// as it does on a Unix socket, but it lists the sockets of its network namespace with their users.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <optional>

struct sockaddr_storage;

namespace telegrad {

/// One end of a TCP connection; IPv4 addresses as ::ffff:a.b.c.d.
struct TcpEnd {
  std::array<std::uint8_t, 16> ip{};
  std::uint16_t port = 0;
  bool operator==(const TcpEnd&) const = default;
};

/// Null when it is not an IP address.
std::optional<TcpEnd> tcp_end(const sockaddr_storage& address);

/// The user of the socket that is bound to `mine` and connected to `theirs`, out of a table as /proc/net/tcp and
/// /proc/net/tcp6 are. Null when it is not there, or when no process has it any more.
std::optional<uid_t> user_in_table(std::FILE* table, const TcpEnd& mine, const TcpEnd& theirs);

/// The user of the process at the other end of a connected TCP socket. Null when it is on another host (or in another
/// network namespace), when its process has gone, or when the kernel does not tell.
std::optional<uid_t> user_of_local_peer(int fd);

}  // namespace telegrad

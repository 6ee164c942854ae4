#include "transports/peer_user.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

namespace telegrad {
namespace {

/// An address as the table has it: words of 32 bits in the host's order, in hexadecimal.
std::optional<TcpEnd> parse(std::string_view hex, unsigned port) {
  TcpEnd end;
  end.port = static_cast<std::uint16_t>(port);
  std::size_t at = 0;
  if (hex.size() == 8) {
    at = 12;
    end.ip[10] = end.ip[11] = 0xff;
  } else if (hex.size() != 32) {
    return std::nullopt;
  }
  for (; !hex.empty(); hex.remove_prefix(8), at += 4) {
    char digits[9] = {};
    std::memcpy(digits, hex.data(), 8);
    const auto word = static_cast<std::uint32_t>(std::strtoul(digits, nullptr, 16));
    std::memcpy(end.ip.data() + at, &word, sizeof word);
  }
  return end;
}

/// Can a socket of this host have the address? Then the other end is here.
bool is_ours(sockaddr_storage address) {
  if (address.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address).sin_port = 0;
  } else {
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = 0;
  }
  const int probe = ::socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return false;
  const bool ours = ::bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(probe);
  return ours;
}

}  // namespace

std::optional<TcpEnd> tcp_end(const sockaddr_storage& address) {
  TcpEnd end;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    end.ip[10] = end.ip[11] = 0xff;
    std::memcpy(end.ip.data() + 12, &v4.sin_addr, 4);
    end.port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(end.ip.data(), &v6.sin6_addr, 16);
    end.port = ntohs(v6.sin6_port);
  } else {
    return std::nullopt;
  }
  return end;
}

std::optional<uid_t> user_in_table(std::FILE* table, const TcpEnd& mine, const TcpEnd& theirs) {
  char line[512];
  while (std::fgets(line, sizeof line, table)) {
    char local[33], remote[33];
    unsigned local_port = 0, remote_port = 0, uid = 0;
    unsigned long inode = 0;
    // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
    if (std::sscanf(line, "%*d: %32[0-9A-Fa-f]:%4x %32[0-9A-Fa-f]:%4x %*x %*s %*s %*s %u %*d %lu", local, &local_port,
                    remote, &remote_port, &uid, &inode) != 6) {
      continue;  // the heading
    }
    if (local_port != mine.port || remote_port != theirs.port) continue;
    // Without an inode no process has the socket, and the user stands for nobody.
    if (inode != 0 && parse(local, local_port) == mine && parse(remote, remote_port) == theirs) return uid;
  }
  return std::nullopt;
}

std::optional<uid_t> user_of_local_peer(int fd) {
  sockaddr_storage mine{}, theirs{};
  socklen_t size = sizeof mine;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &size) != 0) return std::nullopt;
  size = sizeof theirs;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &size) != 0) return std::nullopt;
  const auto here = tcp_end(mine), there = tcp_end(theirs);
  if (!here || !there || !is_ours(theirs)) return std::nullopt;
  // An IPv4 peer of an IPv6 socket is in the first table, one that speaks IPv4 through IPv6 in the second.
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> table(std::fopen(path, "re"), &std::fclose);
    if (!table) continue;
    if (const auto user = user_in_table(table.get(), *there, *here)) return user;
  }
  return std::nullopt;
}

}  // namespace telegrad

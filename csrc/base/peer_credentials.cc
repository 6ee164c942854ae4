#include "base/peer_credentials.h"

#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace telegrad {
namespace {

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// Parses an address of the table: 32-bit words in host order, in hexadecimal.
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

/// Reads a whole file of /proc from its start; stops at an error.
std::string read_again(int fd) {
  std::string all;
  char part[16384];
  if (::lseek(fd, 0, SEEK_SET) != 0) return all;
  while (true) {
    const ssize_t got = ::read(fd, part, sizeof part);
    if (got <= 0) return all;
    all.append(part, static_cast<std::size_t>(got));
  }
}

/// Returns the part of an address that the kernel compares: the last four bytes for IPv4.
std::string_view significant(const TcpEnd& end) {
  const auto* ip = reinterpret_cast<const char*>(end.ip.data());
  return end.is_v4() ? std::string_view(ip + 12, 4) : std::string_view(ip, 16);
}

inet_diag_req_v2 request_for(const TcpEnd& local, const TcpEnd& remote) {
  inet_diag_req_v2 r{};
  r.sdiag_family = local.is_v4() && remote.is_v4() ? AF_INET : AF_INET6;
  r.sdiag_protocol = IPPROTO_TCP;
  r.idiag_states = ~0u;
  r.id.idiag_sport = htons(local.port);
  r.id.idiag_dport = htons(remote.port);
  const bool v4 = r.sdiag_family == AF_INET;
  const std::string_view from = v4 ? significant(local) : bytes_of(local.ip);
  const std::string_view to = v4 ? significant(remote) : bytes_of(remote.ip);
  std::memcpy(r.id.idiag_src, from.data(), from.size());
  std::memcpy(r.id.idiag_dst, to.data(), to.size());
  r.id.idiag_if = local.interface;
  r.id.idiag_cookie[0] = r.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  return r;
}

bool has_ended(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state != TCP_ESTABLISHED;
}

PeerCredentials unknown(std::string why) { return {.kind = PeerCredentials::Kind::kUnknown, .why = std::move(why)}; }

}  // namespace

bool TcpEnd::is_v4() const {
  return std::all_of(ip.begin(), ip.begin() + 10, [](std::uint8_t b) { return b == 0; }) && ip[10] == 0xff &&
         ip[11] == 0xff;
}

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
    end.interface = v6.sin6_scope_id;
  } else {
    return std::nullopt;
  }
  return end;
}

std::optional<SocketOwner> owner_in_table(std::string_view table, const TcpEnd& local, const TcpEnd& remote) {
  for (std::size_t end = 0; !table.empty(); table.remove_prefix(end)) {
    end = std::min(table.find('\n'), table.size() - 1) + 1;
    const std::string line(table.substr(0, end));
    char from[33], to[33];
    unsigned from_port = 0, to_port = 0, uid = 0;
    unsigned long inode = 0;
    // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
    if (std::sscanf(line.c_str(), "%*d: %32[0-9A-Fa-f]:%4x %32[0-9A-Fa-f]:%4x %*x %*s %*s %*s %u %*d %lu", from,
                    &from_port, to, &to_port, &uid, &inode) != 6) {
      continue;  // table header
    }
    if (from_port != local.port || to_port != remote.port) continue;
    const auto here = parse(from, from_port), there = parse(to, to_port);
    if (here && there && here->same_as(local) && there->same_as(remote)) {
      return SocketOwner{.uid = uid, .inode = inode};
    }
  }
  return std::nullopt;
}

CredentialLookup::CredentialLookup(bool over_netlink) : sockets_(NETLINK_SOCK_DIAG), routes_(NETLINK_ROUTE) {
  if (!over_netlink) routes_.close();
  inet_diag_req_v2 none{};  // matches no socket state
  none.sdiag_family = AF_INET;
  none.sdiag_protocol = IPPROTO_TCP;
  if (over_netlink && sockets_.ask(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, bytes_of(none)).error == 0) return;
  sockets_.close();
  // The first table has IPv4 peers of IPv6 sockets; the second has peers that use IPv4 over IPv6.
  tables_[0] = UniqueFd(::open("/proc/self/net/tcp", O_RDONLY | O_CLOEXEC));
  tables_[1] = UniqueFd(::open("/proc/self/net/tcp6", O_RDONLY | O_CLOEXEC));
}

void CredentialLookup::close() {
  sockets_.close();
  routes_.close();
  for (UniqueFd& table : tables_) table = UniqueFd();
}

/// Returns the owner of the socket in this network namespace that is bound to `local` and connected to `remote`.
std::optional<SocketOwner> CredentialLookup::find(const TcpEnd& local, const TcpEnd& remote) {
  for (const UniqueFd& table : tables_) {
    if (!table) continue;
    if (const auto owner = owner_in_table(read_again(table.get()), local, remote)) return owner;
  }
  const inet_diag_req_v2 request = request_for(local, remote);
  const Netlink::Answer answer = sockets_.ask(SOCK_DIAG_BY_FAMILY, 0, bytes_of(request));
  inet_diag_msg found;
  if (answer.error != 0 || answer.type != SOCK_DIAG_BY_FAMILY || answer.body.size() < sizeof found) return std::nullopt;
  std::memcpy(&found, answer.body.data(), sizeof found);
  // Without such a connection the kernel returns the listening socket.
  if (found.id.idiag_dport != request.id.idiag_dport) return std::nullopt;
  return SocketOwner{.uid = found.idiag_uid, .inode = found.idiag_inode};
}

/// Returns whether a socket of this host can have the address; null if the kernel does not report it.
std::optional<bool> CredentialLookup::is_of_this_host(const sockaddr_storage& address, const TcpEnd& end) {
  struct {
    rtmsg message{};
    rtattr to{};
    std::uint8_t ip[16]{};
    rtattr over{};
    std::uint32_t interface = 0;
  } request;
  const std::string_view ip = significant(end);
  const bool scoped = end.interface != 0;  // an IPv6 address, so all of `ip` is in use
  request.message.rtm_family = end.is_v4() ? AF_INET : AF_INET6;
  request.message.rtm_dst_len = static_cast<unsigned char>(8 * ip.size());
  request.to.rta_type = RTA_DST;
  request.to.rta_len = static_cast<unsigned short>(RTA_LENGTH(ip.size()));
  std::memcpy(request.ip, ip.data(), ip.size());
  request.over.rta_type = RTA_OIF;
  request.over.rta_len = RTA_LENGTH(sizeof request.interface);
  request.interface = end.interface;
  const std::size_t size = sizeof request.message + request.to.rta_len + (scoped ? request.over.rta_len : 0u);
  const Netlink::Answer answer = routes_.ask(RTM_GETROUTE, 0, bytes_of(request).substr(0, size));
  rtmsg route;
  if (answer.error == 0 && answer.type == RTM_NEWROUTE && answer.body.size() >= sizeof route) {
    std::memcpy(&route, answer.body.data(), sizeof route);
    return route.rtm_type == RTN_LOCAL;
  }
  if (answer.error == ENETUNREACH || answer.error == EHOSTUNREACH) return false;
  // Without routing netlink: bind() succeeds only for addresses of this host.
  sockaddr_storage any_port = address;
  if (address.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(any_port).sin_port = 0;
  } else {
    reinterpret_cast<sockaddr_in6&>(any_port).sin6_port = 0;
  }
  const UniqueFd probe(::socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe) return std::nullopt;
  return ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&any_port), sizeof any_port) == 0;
}

PeerCredentials CredentialLookup::of_tcp_peer(int fd) {
  sockaddr_storage mine{}, theirs{};
  socklen_t my_size = sizeof mine, their_size = sizeof theirs;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &my_size) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &their_size) != 0) {
    return unknown("");  // the other end has been closed
  }
  const auto here = tcp_end(mine), there = tcp_end(theirs);
  if (!here || !there) return unknown("its address is not an IP address");
  const auto owner = find(*there, *here);
  if (owner && owner->inode != 0) return {.kind = PeerCredentials::Kind::kUser, .uid = owner->uid};
  const auto ours = is_of_this_host(theirs, *there);
  const int error = errno;
  if (ours == false) return {.kind = PeerCredentials::Kind::kRemote};
  if (has_ended(fd)) return unknown("");
  if (!ours) {
    return unknown("the kernel does not tell whether its address is this host's (" +
                   std::generic_category().message(error) +
                   "): allow this process netlink sockets, or more descriptors");
  }
  if (!find(*here, *there)) {
    return unknown("the kernel lists no TCP sockets: allow this process netlink sockets (sock_diag), or /proc/net/tcp");
  }
  return unknown("the kernel lists no such socket in this network namespace: connect without address translation");
}

}  // namespace telegrad

#include "transports/unix/unix_socket.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>

namespace telegrad {
std::pair<sockaddr_un, socklen_t> unix_name(const std::string& address) {
  const std::string path = after_scheme(address);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof name.sun_path) raise(ENAMETOOLONG, "not a socket address: " + address);
  std::memcpy(name.sun_path, path.data(), path.size());
  if (path[0] != '@') return {name, sizeof name};
  name.sun_path[0] = 0;
  return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size())};
}

UniqueFd listen_unix(int type, const std::string& address) {
  UniqueFd s = make_socket(AF_UNIX, type, address);
  auto [name, size] = unix_name(address);
  if (::bind(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 || ::listen(s.get(), kListenBacklog) != 0) {
    raise(errno, "cannot listen on " + address);
  }
  return s;
}

UniqueFd connect_unix(int type, const std::string& address) {
  UniqueFd s = make_socket(AF_UNIX, type, address);
  auto [name, size] = unix_name(address);
  if (::connect(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) raise(errno, "cannot reach " + address);
  return s;
}

PeerCredentials unix_credentials(int fd) {
  ucred c;
  socklen_t size = sizeof c;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &size) == 0)
    return {.kind = PeerCredentials::Kind::kUser, .uid = c.uid};
  return {.kind = PeerCredentials::Kind::kUnknown, .why = std::generic_category().message(errno)};
}

}  // namespace telegrad

#include "transports/unix_socket.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>

namespace telegrad {
namespace {

constexpr int kBacklog = 1024;

}  // namespace

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string after_scheme(const std::string& address) { return address.substr(address.find(':') + 1); }

Descriptor make_socket(int family, int type, const std::string& address) {
  Descriptor s(::socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!s) raise(errno, "cannot make a socket for " + address);
  return s;
}

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

Descriptor listen_unix(int type, const std::string& address) {
  Descriptor s = make_socket(AF_UNIX, type, address);
  auto [name, size] = unix_name(address);
  if (::bind(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0 || ::listen(s.get(), kBacklog) != 0) {
    raise(errno, "cannot listen on " + address);
  }
  return s;
}

Descriptor connect_unix(int type, const std::string& address) {
  Descriptor s = make_socket(AF_UNIX, type, address);
  auto [name, size] = unix_name(address);
  if (::connect(s.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) raise(errno, "cannot reach " + address);
  return s;
}

PeerUser unix_peer(int fd) {
  ucred c;
  socklen_t size = sizeof c;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &size) == 0) return {.kind = PeerUser::Kind::kUser, .uid = c.uid};
  return {.kind = PeerUser::Kind::kUnknown, .why = std::generic_category().message(errno)};
}

}  // namespace telegrad

#include "transports/stream/socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace telegrad {

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string after_scheme(const std::string& address) { return address.substr(address.find(':') + 1); }

UniqueFd make_socket(int family, int type, const std::string& address) {
  UniqueFd s(::socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!s) raise(errno, "cannot make a socket for " + address);
  return s;
}

}  // namespace telegrad

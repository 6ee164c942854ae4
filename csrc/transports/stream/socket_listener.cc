#include "transports/stream/socket_listener.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <exception>

namespace telegrad {

std::unique_ptr<Link> SocketListener::accept() {
  UniqueFd s(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  stuck_ = false;
  if (s && !spare_) spare_ = make_spare();  // another thread took the descriptor when this one rejected a connection
  try {
    if (s) return make_(std::move(s), address_);
  } catch (const std::exception&) {  // no memory, or none for OpenSSL: the peer sees an end of stream
    return nullptr;
  }
  stuck_ = errno == ENOBUFS || errno == ENOMEM || ((errno == EMFILE || errno == ENFILE) && !reject_one());
  return nullptr;
}

/// Accepts and closes a connection for which there is no descriptor, so that the peer sees an end of stream. Returns
/// false if it stays queued.
bool SocketListener::reject_one() {
  if (!spare_) return false;
  spare_ = UniqueFd();
  const bool rejected{UniqueFd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))};
  spare_ = make_spare();
  return rejected;
}

UniqueFd SocketListener::make_spare() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace telegrad

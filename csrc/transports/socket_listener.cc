#include "transports/socket_listener.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>

namespace telegrad {

std::unique_ptr<Link> SocketListener::accept() {
  Descriptor s(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (s) return make_(std::move(s), address_);
  if (errno == EMFILE || errno == ENFILE) turn_one_away();
  return nullptr;
}

/// Accepts and closes a connection for which there is no descriptor, so that the peer sees an end of stream. If it
/// stayed queued, the listener would poll readable forever.
void SocketListener::turn_one_away() {
  spare_ = Descriptor();
  Descriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  spare_ = make_spare();
}

Descriptor SocketListener::make_spare() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace telegrad

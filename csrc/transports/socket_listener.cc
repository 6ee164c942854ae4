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

/// Out of descriptors: whoever knocks is told so by an end of stream. Left waiting, it would wake us for ever.
void SocketListener::turn_one_away() {
  spare_ = Descriptor();
  Descriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  spare_ = make_spare();
}

Descriptor SocketListener::make_spare() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace telegrad

#include "transports/stream/byte_stream.h"

#include <cerrno>

namespace telegrad {

ssize_t ByteStream::write(const iovec* parts, int count) {
  if (count == 1) return ::send(fd(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<std::size_t>(count);
  return ::sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t ByteStream::read(const iovec* parts, int count, bool from_socket) {
  if (!from_socket) {
    errno = EAGAIN;
    return -1;
  }
  return count == 1 ? ::recv(fd(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT) : ::readv(fd(), parts, count);
}

}  // namespace telegrad

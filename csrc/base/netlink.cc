#include "base/netlink.h"

#include <linux/netlink.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace telegrad {
namespace {

constexpr std::size_t kBuffer = 8192;  // the kernel's answers are not larger

}  // namespace

Netlink::Netlink(int family) : socket_(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, family)) {
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  if (!socket_ || ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&kernel), sizeof kernel) != 0) {
    error_ = errno;
    socket_ = UniqueFd();
  }
  buffer_.resize(kBuffer / sizeof buffer_[0]);
}

Netlink::Answer Netlink::ask(std::uint16_t type, std::uint16_t flags, std::string_view request) {
  if (!socket_) return {.error = error_ ? error_ : EBADF};
  nlmsghdr header{};
  header.nlmsg_len = static_cast<std::uint32_t>(NLMSG_HDRLEN + request.size());
  header.nlmsg_type = type;
  header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
  header.nlmsg_seq = ++sequence_;
  const iovec parts[] = {{&header, sizeof header}, {const_cast<char*>(request.data()), request.size()}};
  if (::writev(socket_.get(), parts, 2) < 0) return {.error = errno};
  while (true) {  // skip the rest of an earlier answer
    const ssize_t size = ::recv(socket_.get(), buffer_.data(), kBuffer, 0);
    if (size < 0) return {.error = errno};
    nlmsghdr first;
    if (static_cast<std::size_t>(size) < sizeof first) return {.error = EBADMSG};
    std::memcpy(&first, buffer_.data(), sizeof first);
    if (first.nlmsg_seq != sequence_) continue;
    if (first.nlmsg_len < sizeof first || first.nlmsg_len > static_cast<std::size_t>(size)) return {.error = EBADMSG};
    const std::string_view body(reinterpret_cast<const char*>(buffer_.data()) + NLMSG_HDRLEN,
                                first.nlmsg_len - NLMSG_HDRLEN);
    if (first.nlmsg_type != NLMSG_ERROR) return {.type = first.nlmsg_type, .body = body};
    nlmsgerr failure{};
    if (body.size() < sizeof failure) return {.error = EBADMSG};
    std::memcpy(&failure, body.data(), sizeof failure);
    return {.error = -failure.error};
  }
}

}  // namespace telegrad

#include "transports/stream/stream_link.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

namespace telegrad {
namespace {

constexpr std::size_t kBuffer = 64 << 10;
constexpr std::uint64_t kSendTurn = 4 << 20;  // bytes of a message sent before other threads may send
constexpr std::uint64_t kLargeFrame = 1 << 20;
constexpr int kMaxIovecs = 64;  // iovecs per sendmsg

std::string reason(int error) { return std::generic_category().message(error); }

/// A stream shares no memory, so the frame contains the whole message.
void clear_leases(Outgoing& m) {
  for (OutSegment& s : m.segments) s.lease = 0;
}

}  // namespace

StreamLink::StreamLink(UniqueFd socket, std::string description, bool connecting, const SocketKind& kind)
    : socket_(std::move(socket)),
      description_(std::move(description)),
      kind_(kind),
      connecting_(connecting),
      buffer_(new std::byte[kBuffer]) {}

StreamLink::~StreamLink() = default;

void StreamLink::fail(std::string why) {
  std::lock_guard lock(error_mutex_);
  fail_locked(std::move(why));
}

void StreamLink::fail_locked(std::string why) {
  if (!broken_) error_ = send_error_.empty() ? std::move(why) : send_error_;
  broken_ = true;
}

/// Fails the sending direction. Data that arrived before the end of stream, which `close` causes, can still be read.
SendState StreamLink::fail_to_send(int error) {
  if (error != EPIPE && error != ECONNRESET) {
    std::lock_guard lock(error_mutex_);
    send_error_ = reason(error);
  }
  send_broken_ = true;
  close();
  return SendState::kBroken;
}

std::string StreamLink::error() const {
  std::lock_guard lock(error_mutex_);
  return error_;
}

void StreamLink::set_segment_source(SegmentSource* source) {
  reader_.set_segment_source(source);
  has_segment_source_ = source != nullptr;
}

void StreamLink::stop_sending() { ::shutdown(socket_.get(), SHUT_WR); }

void StreamLink::close() { ::shutdown(socket_.get(), SHUT_RDWR); }

/// Returns true once connected. The kernel reports an error only once, so the lock prevents that the other thread sees
/// the failure before this one has recorded the reason.
bool StreamLink::finish_connecting() {
  std::lock_guard lock(error_mutex_);
  if (broken_) return false;
  sockaddr_storage peer;
  socklen_t size = sizeof peer;
  if (getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&peer), &size) == 0) {
    connecting_ = false;
    return true;
  }
  int error = 0;
  size = sizeof error;
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_locked("cannot connect: " + reason(error));
  return false;
}

SendState StreamLink::send(Outgoing& m) {
  if (broken_ || send_broken_) return SendState::kBroken;
  if (connecting_ && !finish_connecting()) return broken_ ? SendState::kBroken : SendState::kBlocked;
  if (!buffered_.empty()) {
    const SendState state = flush();
    if (state != SendState::kSent) return state;
  }
  if (m.prefix.empty()) {
    if (!has_segment_source_) clear_leases(m);
    if (frame_size(m) <= kFlatFrame) {
      fill_header(m.header, m);
      std::byte flat[kFlatFrame];
      const std::size_t whole = flatten(m, m.header, flat);
      const ssize_t n = ::send(socket_.get(), flat, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n == static_cast<ssize_t>(whole)) return SendState::kSent;
      if (n > 0) m.sent = static_cast<std::uint64_t>(n);  // the loop below continues, or finds the error
    }
    start_frame(m);
    const bool large = m.total >= kLargeFrame || m.header.type == FrameType::kFragment;
    if (large && !std::exchange(sent_large_, true) && kind_.before_large) kind_.before_large(fd());
  }
  if (m.total == 0) m.total = m.prefix.size() + payload_in_frame(m);
  const std::uint64_t turn = m.sent + kSendTurn;
  while (m.sent < m.total) {
    if (m.sent >= turn) return SendState::kBlocked;
    iovec parts[kMaxIovecs];
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<std::size_t>(fill_iovecs(m, parts, kMaxIovecs, turn - m.sent));
    const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      m.sent += static_cast<std::uint64_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return SendState::kBlocked;
    } else if (errno != EINTR) {
      return fail_to_send(errno);
    }
  }
  return SendState::kSent;
}

bool StreamLink::buffer(const Outgoing& m) { return !broken_ && !send_broken_ && !connecting_ && buffered_.append(m); }

SendState StreamLink::flush() {
  if (broken_ || send_broken_) return SendState::kBroken;
  while (!buffered_.empty()) {
    const ssize_t n = ::send(socket_.get(), buffered_.data(), buffered_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      buffered_.consume(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return SendState::kBlocked;
    } else if (errno != EINTR) {
      return fail_to_send(errno);
    }
  }
  return SendState::kSent;
}

ReceiveState StreamLink::receive(Inbox& inbox, std::size_t budget) {
  if (broken_) return ReceiveState::kBroken;
  std::size_t got = 0;
  try {
    while (true) {
      if (got >= budget && got > 0) return ReceiveState::kMore;
      std::byte* direct = nullptr;
      const std::size_t missing = reader_.direct_target(&direct);
      iovec parts[2];
      int count = 0;
      if (missing > 0) parts[count++] = {direct, std::min(missing, std::max(budget - got, kBuffer))};
      if (missing == 0 || parts[0].iov_len == missing) parts[count++] = {buffer_.get(), kBuffer};
      const ssize_t n = count == 1 ? ::recv(socket_.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT)
                                   : ::readv(socket_.get(), parts, count);
      if (n > 0) {
        const std::size_t size = static_cast<std::size_t>(n);
        received_.store(received_.load(std::memory_order_relaxed) + size, std::memory_order_relaxed);
        const std::size_t placed = missing > 0 ? std::min(size, parts[0].iov_len) : 0;
        reader_.placed(placed);
        got += size;
        if (!reader_.read(buffer_.get(), size - placed, inbox)) {
          fail(reader_.error());
          return ReceiveState::kBroken;
        }
        const std::size_t asked = count == 2 ? parts[0].iov_len + parts[1].iov_len : parts[0].iov_len;
        if (size < asked) return ReceiveState::kIdle;  // drained: avoid a system call that would only confirm it
      } else if (n == 0 && connecting_ && !finish_connecting()) {
        fail("");  // closed before it was connected; keeps an earlier reason
        return ReceiveState::kBroken;
      } else if (n == 0) {
        fail(reader_.at_rest() ? "" : "the stream ended in the middle of a frame");
        return ReceiveState::kBroken;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return ReceiveState::kIdle;
      } else if (errno == ENOTCONN && connecting_) {
        return ReceiveState::kIdle;
      } else if (errno != EINTR) {
        fail(reason(errno));
        return ReceiveState::kBroken;
      }
    }
  } catch (const std::bad_alloc&) {
    fail("no memory for " + reader_.describe());
    return ReceiveState::kBroken;
  }
}

}  // namespace telegrad

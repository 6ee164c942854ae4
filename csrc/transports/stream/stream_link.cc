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

/// A stream shares no memory, so the frame contains the whole message.
void clear_leases(Outgoing& m) {
  for (OutSegment& s : m.segments) s.lease = 0;
}

}  // namespace

StreamLink::StreamLink(std::unique_ptr<ByteStream> stream, std::string description, bool connecting,
                       const SocketKind& kind)
    : stream_(std::move(stream)),
      description_(std::move(description)),
      kind_(kind),
      connecting_(connecting),
      buffer_(new std::byte[kBuffer]) {}

StreamLink::~StreamLink() = default;

LinkError StreamLink::reason(int error) const {
  const LinkError why = error == EPROTO ? stream_->error() : LinkError();
  return why.text.empty() ? LinkError::of_call(error) : why;
}

void StreamLink::fail(LinkError why) {
  std::lock_guard lock(error_mutex_);
  fail_locked(std::move(why));
}

void StreamLink::fail_locked(LinkError why) {
  if (!broken_) error_ = send_error_.text.empty() ? std::move(why) : send_error_;
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

LinkError StreamLink::error() const {
  std::lock_guard lock(error_mutex_);
  return error_;
}

void StreamLink::set_segment_source(SegmentSource* source) {
  reader_.set_segment_source(source);
  has_segment_source_ = source != nullptr;
}

void StreamLink::stop_sending() { ::shutdown(fd(), SHUT_WR); }

void StreamLink::close() { ::shutdown(fd(), SHUT_RDWR); }

/// Returns true once connected. The kernel reports an error only once, so the lock prevents that the other thread sees
/// the failure before this one has recorded the reason.
bool StreamLink::finish_connecting() {
  std::lock_guard lock(error_mutex_);
  if (broken_) return false;
  sockaddr_storage peer;
  socklen_t size = sizeof peer;
  if (getpeername(fd(), reinterpret_cast<sockaddr*>(&peer), &size) == 0) {
    connecting_ = false;
    return true;
  }
  int error = 0;
  size = sizeof error;
  getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_locked(reason(error).with_context("cannot connect"));
  return false;
}

SendState StreamLink::send(Outgoing& m) {
  if (broken_ || send_broken_) return SendState::kBroken;
  if (connecting_ && !finish_connecting()) return broken_ ? SendState::kBroken : SendState::kBlocked;
  if (!buffered_.empty()) {
    const SendState state = flush();
    if (state != SendState::kSent) return state;
  }
  if (!m.is_begun()) {
    if (!has_segment_source_) clear_leases(m);
    if (frame_size(m) <= kFlatFrame) {
      fill_header(m.header, m);
      std::byte flat[kFlatFrame];
      const std::size_t whole = flatten(m, m.header, flat);
      const iovec part{flat, whole};
      const ssize_t n = stream_->write(&part, 1);
      if (n == static_cast<ssize_t>(whole) && !stream_->holds_output()) return SendState::kSent;
      if (n > 0) m.sent = static_cast<std::uint64_t>(n);  // the loop below continues, or finds the error
    }
    start_frame(m);
    const bool large = m.total >= kLargeFrame || m.header.type == FrameType::kFragment;
    if (large && !std::exchange(sent_large_, true) && kind_.before_large) kind_.before_large(fd());
  }
  const std::uint64_t turn = m.sent + kSendTurn;
  while (m.sent < m.total) {
    if (m.sent >= turn) return SendState::kBlocked;
    iovec parts[kMaxIovecs];
    const ssize_t n = stream_->write(parts, fill_iovecs(m, parts, kMaxIovecs, turn - m.sent));
    if (n >= 0) {
      m.sent += static_cast<std::uint64_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return SendState::kBlocked;
    } else if (errno != EINTR) {
      return fail_to_send(errno);
    }
  }
  return flush_stream();
}

bool StreamLink::buffer(const Outgoing& m) { return !broken_ && !send_broken_ && !connecting_ && buffered_.append(m); }

/// Sends what the stream holds.
SendState StreamLink::flush_stream() {
  while (stream_->flush() != 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SendState::kBlocked;
    if (errno != EINTR) return fail_to_send(errno);
  }
  return SendState::kSent;
}

SendState StreamLink::flush() {
  if (broken_ || send_broken_) return SendState::kBroken;
  while (!buffered_.empty()) {
    const iovec part{const_cast<std::byte*>(buffered_.data()), buffered_.size()};
    const ssize_t n = stream_->write(&part, 1);
    if (n >= 0) {
      buffered_.consume(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return SendState::kBlocked;
    } else if (errno != EINTR) {
      return fail_to_send(errno);
    }
  }
  return flush_stream();
}

ReceiveState StreamLink::nothing_to_read() {
  return stream_->may_write_now() ? ReceiveState::kToSend : ReceiveState::kIdle;
}

ReceiveState StreamLink::receive(Inbox& inbox, std::size_t budget) {
  if (broken_) return ReceiveState::kBroken;
  std::size_t got = 0;
  try {
    while (true) {
      const bool spent = got >= budget && got > 0;
      if (spent && !stream_->holds_input()) return ReceiveState::kMore;
      std::byte* direct = nullptr;
      const std::size_t missing = reader_.direct_target(&direct);
      iovec parts[2];
      int count = 0;
      if (missing > 0) parts[count++] = {direct, std::min(missing, spent ? kBuffer : std::max(budget - got, kBuffer))};
      if (missing == 0) parts[count++] = {buffer_.get(), kBuffer};
      if (missing > 0 && parts[0].iov_len == missing) parts[count++] = {buffer_.get(), reader_.read_ahead(kBuffer)};
      const ssize_t n = stream_->read(parts, count, !spent);
      if (n > 0) {
        const std::size_t size = static_cast<std::size_t>(n);
        received_.store(received_.load(std::memory_order_relaxed) + size, std::memory_order_relaxed);
        const std::size_t placed = missing > 0 ? std::min(size, parts[0].iov_len) : 0;
        reader_.placed(placed);
        got += size;
        if (!reader_.read(buffer_.get(), size - placed, inbox)) {
          violated_ = true;
          fail(reader_.error());
          return ReceiveState::kBroken;
        }
        const std::size_t asked = count == 2 ? parts[0].iov_len + parts[1].iov_len : parts[0].iov_len;
        // Drained: avoid a system call that would only confirm it.
        if (size < asked && !spent && !stream_->holds_input()) return nothing_to_read();
      } else if (n == 0 && connecting_ && !finish_connecting()) {
        fail("");  // closed before it was connected; keeps an earlier reason
        return ReceiveState::kBroken;
      } else if (n == 0) {
        fail(reader_.end());
        return ReceiveState::kBroken;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return spent ? ReceiveState::kMore : nothing_to_read();
      } else if (errno == ENOTCONN && connecting_) {
        return ReceiveState::kIdle;
      } else if (errno != EINTR) {
        violated_ = errno == EPROTO;  // a record of TLS was changed
        fail(reason(errno));
        return ReceiveState::kBroken;
      }
    }
  } catch (const std::bad_alloc&) {
    violated_ = true;
    fail("no memory for " + reader_.describe());
    return ReceiveState::kBroken;
  }
}

}  // namespace telegrad

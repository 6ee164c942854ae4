#include "transports/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

namespace telegrad {
namespace {

constexpr std::size_t kBuffer = 64 << 10;
constexpr std::size_t kDirect = 16 << 10;  // a part with this much missing is read straight into place
constexpr std::uint64_t kTurn = 4 << 20;   // bytes of a message sent before other threads have their turn
constexpr int kVectors = 64;               // iovecs a sendmsg
constexpr std::size_t kFlat = 1024;        // a frame up to here is copied together and sent as one piece
constexpr std::size_t kHeld = 8 << 10;     // bytes of such frames that wait for others to leave with

std::string reason(int error) { return std::generic_category().message(error); }

/// The pieces of a frame after its first `sent` bytes, as iovecs: kVectors of them, and `most` bytes, at most.
int gather(Outgoing& m, iovec* out, std::uint64_t most) {
  int n = 0;
  std::uint64_t begin = 0;  // of the piece, in the frame
  auto add = [&](const void* data, std::uint64_t size) {
    const std::uint64_t skip = m.sent > begin ? std::min(m.sent - begin, size) : 0;
    const std::uint64_t taken = std::min(size - skip, most);
    if (taken > 0) out[n++] = {static_cast<char*>(const_cast<void*>(data)) + skip, taken};
    most -= taken;
    begin += size;
  };
  add(m.prefix.data(), m.prefix.size());
  add(m.body.data(), m.body.size());
  begin += m.passed;
  for (std::size_t i = m.segment; i < m.segments.size() && n < kVectors && most > 0; ++i) {
    const std::uint64_t size = m.segments[i].size;
    if (i == m.segment && begin + size <= m.sent) {
      ++m.segment;
      m.passed += size;
    }
    add(m.segments[i].data, size);
  }
  return n;
}

void complete(FrameHeader& h, const Outgoing& m) {
  h.name_size = static_cast<std::uint32_t>(m.name.size());
  h.body_size = m.body.size();
  h.segment_count = static_cast<std::uint32_t>(m.segments.size());
}

std::uint64_t frame_size(const Outgoing& m) {
  return sizeof m.header + m.segments.size() * sizeof(SegmentHeader) + m.name.size() + m.payload_size();
}

/// The whole frame in one piece; its size.
std::size_t flatten(const Outgoing& m, const FrameHeader& header, std::byte* out) {
  std::byte* at = out;
  auto add = [&at](const void* data, std::size_t size) {
    if (size > 0) std::memcpy(at, data, size);
    at += size;
  };
  add(&header, sizeof header);
  for (const auto& s : m.segments) {
    const SegmentHeader h{.size = s.size, .lease = 0};
    add(&h, sizeof h);
  }
  add(m.name.data(), m.name.size());
  add(m.body.data(), m.body.size());
  for (const auto& s : m.segments) add(s.data, s.size);
  return static_cast<std::size_t>(at - out);
}

void compose_prefix(Outgoing& m) {
  m.prefix.reserve(sizeof m.header + m.segments.size() * sizeof(SegmentHeader) + m.name.size());
  m.prefix.append(reinterpret_cast<const char*>(&m.header), sizeof m.header);
  for (const auto& s : m.segments) {
    const SegmentHeader h{.size = s.size, .lease = 0};
    m.prefix.append(reinterpret_cast<const char*>(&h), sizeof h);
  }
  m.prefix.append(m.name);
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int Descriptor::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

StreamLink::StreamLink(Descriptor socket, std::string description, bool connecting,
                       std::optional<Credentials> (*credentials_of)(int fd))
    : socket_(std::move(socket)),
      description_(std::move(description)),
      credentials_of_(credentials_of),
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

/// Nothing more can be sent. What has arrived can still be read, up to the end that `close` puts there.
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

void StreamLink::close() { ::shutdown(socket_.get(), SHUT_RDWR); }

/// True once connected. The kernel tells only once why that failed: the lock keeps the other thread from finding out
/// that it did before this one has said why.
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
  if (held_end_ > 0) {
    const SendState state = release();
    if (state != SendState::kSent) return state;
  }
  if (m.prefix.empty()) {
    complete(m.header, m);
    if (frame_size(m) <= kFlat) {
      std::byte flat[kFlat];
      const std::size_t whole = flatten(m, m.header, flat);
      const ssize_t n = ::send(socket_.get(), flat, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n == static_cast<ssize_t>(whole)) return SendState::kSent;
      if (n > 0) m.sent = static_cast<std::uint64_t>(n);  // the loop below goes on, or finds out what is wrong
    }
    compose_prefix(m);
  }
  if (m.total == 0) m.total = m.prefix.size() + m.payload_size();
  const std::uint64_t turn = m.sent + kTurn;
  while (m.sent < m.total) {
    if (m.sent >= turn) return SendState::kBlocked;
    iovec parts[kVectors];
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<std::size_t>(gather(m, parts, turn - m.sent));
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

bool StreamLink::hold(const Outgoing& m) {
  const std::uint64_t size = frame_size(m);
  if (size > kFlat || held_end_ + size > kHeld || broken_ || send_broken_ || connecting_) return false;
  if (!held_) {
    held_.reset(new (std::nothrow) std::byte[kHeld]);
    if (!held_) return false;
  }
  FrameHeader header = m.header;
  complete(header, m);
  held_end_ += flatten(m, header, held_.get() + held_end_);
  return true;
}

SendState StreamLink::release() {
  if (broken_ || send_broken_) return SendState::kBroken;
  while (held_begin_ < held_end_) {
    const ssize_t n =
        ::send(socket_.get(), held_.get() + held_begin_, held_end_ - held_begin_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      held_begin_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return SendState::kBlocked;
    } else if (errno != EINTR) {
      return fail_to_send(errno);
    }
  }
  held_begin_ = held_end_ = 0;
  return SendState::kSent;
}

bool StreamLink::take(void* to, std::size_t size) {
  if (end_ - begin_ < size) return false;
  std::memcpy(to, buffer_.get() + begin_, size);
  begin_ += size;
  return true;
}

/// Moves buffered bytes into a part of `size` bytes; true when it is full.
bool StreamLink::fill(std::byte* to, std::size_t size) {
  const std::size_t n = std::min(end_ - begin_, size - filled_);
  if (n > 0) std::memcpy(to + filled_, buffer_.get() + begin_, n);
  begin_ += n;
  filled_ += n;
  if (filled_ < size) return false;
  filled_ = 0;
  return true;
}

bool StreamLink::begin_frame() {
  FrameHeader& h = incoming_.header;
  if (!take(&h, sizeof h)) return false;
  if (h.magic != kMagic) {
    fail("what arrived is not a Telegrad frame");
  } else if (h.name_size > limits_.name || h.body_size > limits_.body || h.segment_count > limits_.segments) {
    fail("a frame of " + std::to_string(h.body_size) + " bytes with " + std::to_string(h.segment_count) +
         " segments and a name of " + std::to_string(h.name_size) + " bytes is over the limits (" +
         std::to_string(limits_.body) + ", " + std::to_string(limits_.segments) + ", " + std::to_string(limits_.name) +
         ")");
  } else {
    segment_headers_.clear();
    incoming_.name.clear();
    incoming_.segments.clear();
    incoming_.body.reset();
    segment_ = 0;
    step_ = Step::kSegmentHeaders;
    return true;
  }
  return false;
}

bool StreamLink::begin_segments(Inbox& inbox) {
  // Headers are taken one by one, so a lying count costs nothing before the bytes are really there.
  while (segment_headers_.size() < incoming_.header.segment_count) {
    SegmentHeader h;
    if (!take(&h, sizeof h)) return false;
    if (h.lease != 0) {
      fail("a stream link got a segment that lies in shared memory");
      return false;
    }
    segment_headers_.push_back(h);
  }
  std::uint64_t total = 0;
  for (const auto& h : segment_headers_) {
    if (h.size > limits_.message || (total += h.size) > limits_.message) {
      fail("a message of more than " + std::to_string(limits_.message) + " bytes is over the limit");
      return false;
    }
  }
  incoming_.name.resize(incoming_.header.name_size);
  if (incoming_.header.body_size > 0) incoming_.body = inbox.allocate(incoming_.header.body_size);
  incoming_.segments.reserve(segment_headers_.size());
  for (const auto& h : segment_headers_) incoming_.segments.push_back(inbox.allocate(h.size));
  step_ = Step::kName;
  return true;
}

/// Understands what is buffered; false when more bytes are needed or the link failed.
bool StreamLink::parse(Inbox& inbox) {
  switch (step_) {
    case Step::kHeader:
      return begin_frame();
    case Step::kSegmentHeaders:
      return begin_segments(inbox);
    case Step::kName:
      if (!fill(reinterpret_cast<std::byte*>(incoming_.name.data()), incoming_.name.size())) return false;
      step_ = Step::kBody;
      [[fallthrough]];
    case Step::kBody:
      if (incoming_.body && !fill(incoming_.body->data(), incoming_.body->size())) return false;
      step_ = Step::kSegments;
      [[fallthrough]];
    case Step::kSegments:
      for (; segment_ < incoming_.segments.size(); ++segment_) {
        if (!fill(incoming_.segments[segment_]->data(), incoming_.segments[segment_]->size())) return false;
      }
      step_ = Step::kHeader;
      inbox.deliver(std::move(incoming_));
      incoming_ = {};
      return true;
  }
  return false;
}

/// Where the rest of a large part may be read straight to, and how much of it is missing.
std::size_t StreamLink::direct_target(std::byte** to) const {
  Block* block = nullptr;
  if (step_ == Step::kBody) block = incoming_.body.get();
  if (step_ == Step::kSegments && segment_ < incoming_.segments.size()) block = incoming_.segments[segment_].get();
  if (!block || block->size() - filled_ < kDirect) return 0;
  *to = block->data() + filled_;
  return block->size() - filled_;
}

ReceiveState StreamLink::receive(Inbox& inbox, std::size_t budget) {
  std::size_t got = 0;
  try {
    while (true) {
      while (!broken_ && parse(inbox)) {
      }
      if (broken_) return ReceiveState::kBroken;
      if (got >= budget) return ReceiveState::kMore;
      if (begin_ == end_) begin_ = end_ = 0;
      if (end_ == kBuffer) {  // the tail of a small part: make room
        std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
      }
      std::byte* direct = nullptr;
      const std::size_t missing = begin_ == end_ ? direct_target(&direct) : 0;
      iovec parts[2];
      int count = 0;
      if (missing > 0) parts[count++] = {direct, std::min(missing, std::max(budget - got, kBuffer))};
      const std::size_t room = kBuffer - end_;
      if (missing == 0 || parts[0].iov_len == missing) parts[count++] = {buffer_.get() + end_, room};
      const ssize_t n = count == 1 ? ::recv(socket_.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT)
                                   : ::readv(socket_.get(), parts, count);
      if (n > 0) {
        const std::size_t size = static_cast<std::size_t>(n);
        const std::size_t placed = missing > 0 ? std::min(size, parts[0].iov_len) : 0;
        filled_ += placed;
        end_ += size - placed;
        got += size;
        const std::size_t asked = count == 2 ? parts[0].iov_len + parts[1].iov_len : parts[0].iov_len;
        if (size < asked) {  // drained: do not pay a system call to hear so
          while (!broken_ && parse(inbox)) {
          }
          return broken_ ? ReceiveState::kBroken : ReceiveState::kIdle;
        }
      } else if (n == 0 && connecting_ && !finish_connecting()) {
        fail("");  // closed before it was connected, unless the reason is known by now
        return ReceiveState::kBroken;
      } else if (n == 0) {
        fail(step_ == Step::kHeader && begin_ == end_ ? "" : "the stream ended in the middle of a frame");
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
    fail("no memory for a message of " + std::to_string(incoming_.header.body_size) + " bytes and " +
         std::to_string(incoming_.header.segment_count) + " segments");
    return ReceiveState::kBroken;
  }
}

}  // namespace telegrad

#include "transports/shm/shm_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "memory/copy.h"
#include "transports/shm/layout.h"
#include "transports/shm/seqpacket.h"
#include "transports/transports.h"
#include "transports/unix/unix_socket.h"

namespace telegrad {
namespace {

constexpr std::uint64_t kSendTurn = 4 << 20;         // bytes of a message sent before other threads may send
constexpr std::size_t kMinRead = 64 << 10;           // bytes of the ring read at once, at least
constexpr int kMaxIovecs = 64;                       // parts of a message per step
constexpr std::uint64_t kMinArenaSegment = 8 << 10;  // segments of at least this size go into the arena,
constexpr std::uint64_t kMinWaitSize = 8 << 20;      // and from this size on they wait for an offered chunk
constexpr std::uint64_t kArenaTurn = 32 << 20;       // bytes copied into the arena before other threads may send
constexpr int kSocketBuffer = 1;                     // the kernel raises this to its minimum
constexpr int kFillPackets = 64;                     // packets that fill the socket buffer in any case

std::string reason(int error) { return std::generic_category().message(error); }

void check_user(int socket, const std::string& description) {
  const PeerCredentials peer = unix_credentials(socket);
  if (peer.kind == PeerCredentials::Kind::kUser && peer.uid == geteuid()) return;
  raise(EPERM, "the process at " + description + " runs as another user: memory is shared within one user only");
}

}  // namespace

ShmLink::ShmLink(UniqueFd socket, std::string description, int end)
    : socket_(std::move(socket)), description_(std::move(description)), end_(end) {
  setsockopt(fd(), SOL_SOCKET, SO_SNDBUF, &kSocketBuffer, sizeof kSocketBuffer);
}

ShmLink::~ShmLink() {
  close();
  if (arena_) arena_->close();
  if (peer_arena_) peer_arena_->close();
}

std::unique_ptr<ShmLink> ShmLink::connect(UniqueFd socket, std::string description) {
  check_user(socket.get(), description);
  SharedMemory memory = SharedMemory::create(kShmSize);
  memory.reserve(0, kShmSize);
  auto* shared = new (memory.data()) ShmControl{};
  for (RingControl& ring : shared->rings) ring.sleeps.store(1, std::memory_order_relaxed);
  const ShmPacket packet{.what = ShmPacket::kMemory, .number = kShmLayout, .size = kShmSize};
  const int error = send_packet(socket.get(), &packet, sizeof packet, memory.file());
  if (error != 0) raise(error, "cannot reach " + description);
  std::unique_ptr<ShmLink> link(new ShmLink(std::move(socket), std::move(description), 0));
  link->use(std::move(memory));
  return link;
}

std::unique_ptr<ShmLink> ShmLink::accept(UniqueFd socket, std::string description) {
  std::unique_ptr<ShmLink> link(new ShmLink(std::move(socket), std::move(description), 1));
  link->receive_packets(1);  // the memory has most often arrived; later packets are for `receive`
  return link;
}

void ShmLink::use(SharedMemory memory) {
  memory.exclude_from_forks();
  memory.close_file();
  memory_ = std::make_shared<SharedMemory>(std::move(memory));
  auto* shared = std::launder(reinterpret_cast<ShmControl*>(memory_->data()));
  std::byte* data[2] = {memory_->data() + kShmRings, memory_->data() + kShmRings + kShmRing};
  out_ = RingWriter(&shared->rings[end_], data[end_], kShmRing);
  in_ = RingReader(&shared->rings[1 - end_], data[1 - end_], kShmRing);
  arena_ = Arena::make(&shared->releases[end_]);
  peer_arena_ = PeerArena::make(memory_, &shared->releases[1 - end_]);
  set_limits(limits_);
  shared_.store(shared, std::memory_order_release);
}

void ShmLink::set_limits(const Limits& limits) {
  limits_ = limits;
  reader_.set_limits(limits);
  if (arena_) arena_->set_limit(limits.leased);
  if (peer_arena_) peer_arena_->set_limit(limits.leased);
}

void ShmLink::fail(std::string why) {
  std::lock_guard lock(error_mutex_);
  if (!broken_) error_ = std::move(why);
  broken_ = true;
}

std::string ShmLink::error() const {
  std::lock_guard lock(error_mutex_);
  return error_;
}

PeerCredentials ShmLink::peer_credentials(CredentialLookup&) const { return unix_credentials(fd()); }

/// Counts what the peer has written, read or not.
std::uint64_t ShmLink::received_bytes() const {
  const ShmControl* shared = shared_.load(std::memory_order_acquire);
  return shared ? shared->rings[1 - end_].written.load(std::memory_order_relaxed) : 0;
}

void ShmLink::close() {
  if (ShmControl* shared = shared_.load(std::memory_order_acquire)) shared->closed.store(1, std::memory_order_relaxed);
  ::shutdown(fd(), SHUT_RDWR);
}

// ---- sending

/// Fails the sending direction. Data that has arrived can still be read.
SendState ShmLink::fail_to_send() {
  send_broken_ = true;
  close();
  return SendState::kBroken;
}

/// Publishes the bytes in the ring and wakes the reader; returns false if the other end has closed.
bool ShmLink::publish() {
  if (!out_.publish()) return true;
  const int error = send_packet(fd(), "", 1);
  return error == 0 || error == EAGAIN || error == ENOBUFS;  // a full socket wakes as well
}

/// Waits for room in the ring: fills the socket, so that it polls writable once the reader has emptied the ring and
/// then the socket.
SendState ShmLink::blocked() {
  arena_->grow(*this);
  out_.wait();
  for (int i = 0; i < kFillPackets; ++i) {
    const int error = send_packet(fd(), "", 1);
    if (error == EAGAIN || error == ENOBUFS) break;
    if (error != 0) return fail_to_send();
  }
  return SendState::kBlocked;
}

bool ShmLink::is_open() const {
  const ShmControl* shared = shared_.load(std::memory_order_acquire);
  return !broken_ && !send_broken_ && !(shared && shared->closed.load(std::memory_order_relaxed));
}

SendState ShmLink::send(Outgoing& m) {
  if (!is_open()) return SendState::kBroken;
  if (!shared_.load(std::memory_order_acquire)) return SendState::kBlocked;
  if (!buffered_.empty() || has_answers_.load(std::memory_order_relaxed)) {
    const SendState state = flush();
    if (state != SendState::kSent) return state;
  }
  if (m.prefix.empty()) {
    if (!m.segments.empty()) {
      const SendState state = copy_to_arena(m);
      if (state != SendState::kSent) return state;
    }
    start_frame(m);
  }
  if (m.total == 0) m.total = m.prefix.size() + payload_in_frame(m);
  const std::uint64_t turn = m.sent + kSendTurn;
  while (m.sent < m.total) {
    if (m.sent >= turn) return SendState::kBlocked;
    const std::size_t room = out_.room();
    if (room == 0) return out_.broken() ? fail_to_send() : blocked();
    iovec parts[kMaxIovecs];
    const int count = fill_iovecs(m, parts, kMaxIovecs, std::min<std::uint64_t>(room, turn - m.sent));
    for (int i = 0; i < count; ++i) {
      out_.put(parts[i].iov_base, parts[i].iov_len);
      m.sent += parts[i].iov_len;
    }
    if (!publish()) return fail_to_send();
  }
  if (m.header.type == FrameType::kReply && !m.segments.empty()) note_unread(m);
  return SendState::kSent;
}

void ShmLink::note_unread(const Outgoing& m) {
  std::uint64_t bytes = 0;
  for (const OutSegment& s : m.segments) bytes += s.lease != 0 && !s.multicast ? s.size : 0;
  if (bytes > 0) unread_.add(out_.written(), bytes, read_by_peer());
}

std::uint64_t ShmLink::read_by_peer() const {
  const ShmControl* shared = shared_.load(std::memory_order_acquire);
  return shared ? shared->rings[end_].read.load(std::memory_order_relaxed) : 0;
}

/// Copies the large segments of a message into the arena before its frame begins, as far as there is or will be room.
/// Segments sent as bytes cost the receiver a second buffer and two copies. Returns kBlocked if there is no room yet,
/// or if other links are due.
SendState ShmLink::copy_to_arena(Outgoing& m) {
  std::uint64_t copied = 0;
  awaits_chunk_ = false;
  for (; copying_.segment < m.segments.size(); ++copying_.segment) {
    OutSegment& s = m.segments[copying_.segment];
    if (s.multicast && (s.lease = arena_->pass_multicast(s, *this)) != 0) continue;
    if (s.lease != 0) s.lease = Lease::is_returned(s.lease) ? peer_arena_->return_zero_copy(s) : arena_->pass_leased(s);
    if (s.lease != 0) continue;
    if (s.size < kMinArenaSegment) continue;
    if (!copying_.allocation) copying_.allocation = arena_->allocate(s.size);
    if (!copying_.allocation) {
      const Arena::Growth growth = arena_->grow(*this);
      if (s.size < kMinWaitSize || growth == Arena::Growth::kNone) continue;
      awaits_chunk_ = growth == Arena::Growth::kOffered;
      return SendState::kBlocked;
    }
    if (copied >= kArenaTurn) return SendState::kBlocked;
    const std::uint64_t size = std::min(s.size - copying_.copied, kArenaTurn - copied);
    copy_to_shared(copying_.allocation->data + copying_.copied, s.data + copying_.copied, size,
                   s.size < kNonTemporalSize);
    copying_.copied += size;
    copied += size;
    if (copying_.copied < s.size) return SendState::kBlocked;
    s.data = copying_.allocation->data;
    s.lease = copying_.allocation->lease;
    arena_->pass(s.lease);
    copying_.allocation.reset();
    copying_.copied = 0;
  }
  copying_.segment = 0;
  return arena_->corrupt() ? fail_to_send() : SendState::kSent;
}

std::optional<LinkLease> ShmLink::lease(std::size_t size) {
  if (!shared_.load(std::memory_order_acquire)) return std::nullopt;
  try {
    auto leased = arena_->lease(size);
    if (!leased) arena_->grow(*this);
    return leased;
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

bool ShmLink::announce(const MulticastBuffer& buffer) {
  return shared_.load(std::memory_order_acquire) && arena_->announce(buffer, *this);
}

std::size_t ShmLink::lease_capacity() const { return shared_.load(std::memory_order_acquire) ? arena_->size() : 0; }

void ShmLink::trim(Nanos before) {
  if (shared_.load(std::memory_order_acquire)) arena_->trim(before, *this);
}

bool ShmLink::offer(std::uint32_t chunk, std::size_t size, int file) {
  const ShmPacket packet{.what = ShmPacket::kOffer, .number = chunk, .size = size};
  return send_packet(fd(), &packet, sizeof packet, file) == 0;
}

bool ShmLink::drop(std::uint32_t chunk) {
  const ShmPacket packet{.what = ShmPacket::kDrop, .number = chunk, .size = 0};
  return send_packet(fd(), &packet, sizeof packet) == 0;
}

/// Sends the answers to offered chunks. Returns false if the socket does not accept all of them now.
bool ShmLink::answer_offers() {
  if (!has_answers_.load(std::memory_order_relaxed)) return true;
  std::lock_guard lock(answers_mutex_);
  std::erase_if(answers_, [this](const Answer& a) {
    const ShmPacket packet{.what = a.mapped ? ShmPacket::kMapped : ShmPacket::kRefused, .number = a.chunk, .size = 0};
    return send_packet(fd(), &packet, sizeof packet) == 0;
  });
  has_answers_.store(!answers_.empty(), std::memory_order_relaxed);
  return answers_.empty();
}

bool ShmLink::buffer(const Outgoing& m) { return is_open() && shared_ && buffered_.append(m); }

SendState ShmLink::flush() {
  if (broken_ || send_broken_) return SendState::kBroken;
  if (!answer_offers()) return SendState::kBlocked;
  while (!buffered_.empty()) {
    const std::size_t room = out_.room();
    if (room == 0) return out_.broken() ? fail_to_send() : blocked();
    const std::size_t size = std::min(room, buffered_.size());
    out_.put(buffered_.data(), size);
    buffered_.consume(size);
    if (!publish()) return fail_to_send();
  }
  return SendState::kSent;
}

// ---- receiving

bool ShmLink::enable_busy_poll() {
  if (!shared_.load(std::memory_order_relaxed)) return false;
  busy_polled_ = true;
  in_.wake();
  return true;
}

bool ShmLink::ready() { return in_.ready() || broken_; }

bool ShmLink::arm_wakeup() {
  in_.sleep();
  if (in_.ready()) {
    in_.wake();
    return false;
  }
  busy_polled_ = false;
  return true;
}

/// Processes packets of the socket, `most` at a time, until fewer arrive.
void ShmLink::receive_packets(unsigned most) {
  struct Slot {
    std::byte packet[sizeof(ShmPacket)];
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  };
  Slot slots[kPackets];
  iovec parts[kPackets];
  mmsghdr messages[kPackets] = {};
  while (!ended_ && !broken_) {
    for (unsigned i = 0; i < most; ++i) {
      parts[i] = {slots[i].packet, sizeof slots[i].packet};
      messages[i].msg_hdr = {};
      messages[i].msg_hdr.msg_iov = &parts[i];
      messages[i].msg_hdr.msg_iovlen = 1;
      messages[i].msg_hdr.msg_control = slots[i].control;
      messages[i].msg_hdr.msg_controllen = sizeof slots[i].control;
    }
    const int n = ::recvmmsg(fd(), messages, most, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, nullptr);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // A peer that closes with unread packets resets the connection: treat it as a plain end.
      ended_ = true;
      if (errno != ECONNRESET) fail(reason(errno));
      return;
    }
    for (int i = 0; i < n; ++i) {
      msghdr& header = messages[i].msg_hdr;
      UniqueFd passed = received_fd(header);
      if (messages[i].msg_len == 0) {
        ended_ = true;
      } else if (!ended_ && !broken_ && messages[i].msg_len > 1) {
        on_packet(slots[i].packet, messages[i].msg_len, std::move(passed));
      }
    }
    if (most < kPackets || n < static_cast<int>(most)) return;
  }
}

void ShmLink::on_packet(const std::byte* bytes, std::size_t size, UniqueFd passed) {
  ShmPacket packet;
  if (size != sizeof packet) return fail("received bytes that are not a packet of a shared-memory link");
  std::memcpy(&packet, bytes, size);
  if (packet.what == ShmPacket::kMemory && packet.number == kShmLayout && !memory_) {
    return map_link_memory(packet.size, std::move(passed));
  }
  if (!memory_) return fail("the other end uses another memory layout: run one version of telegrad on all workers");
  switch (packet.what) {
    case ShmPacket::kOffer:
      return on_offer(packet.number, packet.size, std::move(passed));
    case ShmPacket::kMapped:
    case ShmPacket::kRefused:
      to_send_ = true;
      return arena_->on_answer(packet.number, packet.what == ShmPacket::kMapped);
    case ShmPacket::kDrop:
      return peer_arena_->unmap(packet.number);
    default:
      return fail("received bytes that are not a packet of a shared-memory link");
  }
}

void ShmLink::map_link_memory(std::uint64_t size, UniqueFd passed) {
  try {
    check_user(fd(), description_);
    if (!passed) raise(EMFILE, "cannot receive shared memory");
    if (size != kShmSize) raise(EINVAL, "received shared memory of the wrong size");
    use(SharedMemory::map_file(std::move(passed), size));
  } catch (const std::system_error& e) {
    fail(e.what());
  }
}

void ShmLink::on_offer(std::uint32_t chunk, std::size_t size, UniqueFd passed) {
  const bool mapped = peer_arena_->map(chunk, size, std::move(passed));
  std::lock_guard lock(answers_mutex_);
  answers_.push_back({chunk, mapped});
  has_answers_.store(true, std::memory_order_relaxed);
  to_send_ = true;
}

BlockPtr ShmLink::map_segment(const FrameHeader&, const SegmentHeader& segment, Inbox& inbox) {
  if (Lease::is_multicast(segment.lease) || !Lease::is_returned(segment.lease)) {
    return peer_arena_->map_segment(segment.lease, segment.size, inbox);
  }
  BlockPtr block = arena_->take_returned(segment.lease & ~Lease::kReturned, segment.size);
  return block ? inbox.adopt(std::move(block)) : nullptr;
}

ReceiveState ShmLink::idle() { return std::exchange(to_send_, false) ? ReceiveState::kToSend : ReceiveState::kIdle; }

ReceiveState ShmLink::receive(Inbox& inbox, std::size_t budget) {
  if (broken_) return ReceiveState::kBroken;
  std::size_t got = 0;
  try {
    while (true) {
      const bool mapped = memory_ != nullptr;
      while (mapped) {
        const auto bytes = in_.peek();
        if (bytes.empty()) break;
        // The rest must be found again: the link is busy polled, or its wake-up is still pending.
        if (got >= budget && got > 0 && (busy_polled_ || !in_.sleeps())) return ReceiveState::kMore;
        const std::size_t size = std::min(bytes.size(), std::max(budget - std::min(budget, got), kMinRead));
        if (!reader_.read(bytes.data(), size, inbox)) {
          fail(reader_.error());
          return ReceiveState::kBroken;
        }
        in_.take(size);
        got += size;
        if (in_.writer_waits()) {
          receive_packets();
          if (!busy_polled_) in_.sleep();  // all wake-ups have been processed
        }
      }
      if (mapped && in_.broken()) fail("the other end has corrupted the memory of the link");
      if (ended_) fail(reader_.end());
      if (broken_) return ReceiveState::kBroken;
      if (busy_polled_ && got > 0) return idle();
      receive_packets();
      if (ended_) continue;  // read the data that was written before the end
      if (broken_) return ReceiveState::kBroken;
      if (!memory_) return idle();
      if (!busy_polled_) in_.sleep();
      if (!in_.ready()) return idle();
    }
  } catch (const std::bad_alloc&) {
    fail("no memory for " + reader_.describe());
    return ReceiveState::kBroken;
  }
}

}  // namespace telegrad

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
constexpr int kMaxIovecs = 64;                       // parts of a message per step
constexpr std::uint64_t kMinArenaSegment = 8 << 10;  // segments of at least this size go into the arena,
constexpr std::uint64_t kMinWaitSize = 8 << 20;      // and from this size on they wait for an offered chunk
constexpr std::uint64_t kArenaTurn = 1 << 20;        // bytes copied into the arena before other threads may send
constexpr FragmentSizes kSizes{.segment = kMinArenaSegment,
                               .fragment = 64 << 10};  // a part of the ring: others wait behind the rest of a fragment
constexpr int kFragmentsPerTurn = 4;                   // before other threads may send
constexpr int kSocketBuffer = 1;                       // the kernel raises this to its minimum
constexpr int kFillPackets = 64;                       // packets that fill the socket buffer in any case

}  // namespace

void ShmLink::check_user(int socket, const std::string& description) {
  const PeerCredentials peer = unix_credentials(socket);
  if (peer.kind == PeerCredentials::Kind::kUser && peer.uid == geteuid()) return;
  raise(EPERM, "the process at " + description + " runs as another user: memory is shared within one user only");
}

ShmLink::ShmLink(UniqueFd socket, std::string description, int end)
    : socket_(std::move(socket)), description_(std::move(description)), end_(end), fragmenter_(kSizes.fragment) {
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
  arena_->set_budget(budget_);
  peer_arena_ = PeerArena::make(memory_, &shared->releases[1 - end_]);
  set_limits(limits_);
  shared_.store(shared, std::memory_order_release);
}

void ShmLink::set_limits(const Limits& limits) {
  limits_ = limits;
  reader_.set_limits(limits);
  reassembler_.set_limits(limits);
  if (arena_) arena_->set_limit(limits.leased);
  if (peer_arena_) peer_arena_->set_limit(limits.leased);
}

void ShmLink::set_budget(const std::shared_ptr<MemoryBudget>& budget) {
  budget_ = budget;
  if (arena_) arena_->set_budget(budget);
}

void ShmLink::fail(LinkError why) {
  std::lock_guard lock(error_mutex_);
  if (!broken_) error_ = std::move(why);
  broken_ = true;
}

LinkError ShmLink::error() const {
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
  turn_is_over_ = false;
  if (!is_open()) return SendState::kBroken;
  if (!shared_.load(std::memory_order_acquire)) return SendState::kBlocked;
  if (!buffered_.empty() || has_answers_.load(std::memory_order_relaxed)) {
    const SendState state = flush();
    if (state != SendState::kSent) return state;
  }
  if (large_.message != &m && !is_large(m)) return send_frame(m, copying_);
  if (!large_.message) {
    large_.message = &m;
    large_.framed = false;
    fragmenter_.begin();
  }
  SendState state = large_.framed ? SendState::kSent : send_frame(m, large_.copying);
  large_.framed = state == SendState::kSent;
  if (large_.framed && m.fragmented) state = send_fragments(m);
  if (state == SendState::kSent && m.fragmented) fragmenter_.end();
  if (state != SendState::kBlocked) {
    large_.message = nullptr;
    large_.copying = {};
    large_.fragment.busy = false;
  }
  return state;
}

bool ShmLink::is_large(const Outgoing& m) const { return !m.segments.empty() && large_bytes(m, kSizes) > 0; }

SendState ShmLink::send_between(Outgoing& m) {
  turn_is_over_ = false;
  if (!is_open()) return SendState::kBroken;
  if (!shared_.load(std::memory_order_acquire)) return SendState::kBlocked;
  SendState state = SendState::kSent;
  if (large_.message && !large_.framed && large_.message->is_begun()) {
    state = send_frame(*large_.message, large_.copying);
    large_.framed = state == SendState::kSent;
  } else if (large_.message && large_.fragment.busy) {
    state = send_fragment(*large_.message);
  }
  const bool awaits_chunk = awaits_chunk_;
  if (state == SendState::kSent) state = send_frame(m, copying_);
  awaits_chunk_ = awaits_chunk && state == SendState::kSent;
  return state;
}

/// Sends a frame, after its large segments have been copied into the arena. Fragments follow.
SendState ShmLink::send_frame(Outgoing& m, Copying& copying) {
  if (!m.is_begun()) {
    if (!m.segments.empty()) {
      const SendState state = copy_to_arena(m, copying);
      if (state != SendState::kSent) return state;
    }
    if (&m == large_.message) fragment(m);
    start_frame(m);
  }
  const SendState state = write(m, kSendTurn);
  if (state == SendState::kSent && m.header.type == FrameType::kReply && !m.segments.empty()) note_unread(m);
  return state;
}

/// Selects the segments that are sent in fragments.
void ShmLink::fragment(Outgoing& m) {
  for (OutSegment& s : m.segments) {
    if (s.lease != 0 || s.size < kSizes.segment) continue;
    s.lease = kFragmented;
    m.fragmented = true;
  }
}

SendState ShmLink::send_fragments(Outgoing& m) {
  for (int turn = 0; large_.fragment.busy || fragmenter_.cut(m, large_.fragment); ++turn) {
    const SendState state = send_fragment(m);
    if (state != SendState::kSent) return state;
    if (turn >= kFragmentsPerTurn) return SendState::kBlocked;
  }
  return SendState::kSent;
}

/// Continues the present fragment.
SendState ShmLink::send_fragment(const Outgoing& m) {
  Fragment& fragment = large_.fragment;
  fragment.locate(m);
  if (!fragment.out.is_begun()) start_frame(fragment.out);
  const SendState state = write(fragment.out, UINT64_MAX);
  fragment.busy = state != SendState::kSent;
  return state;
}

/// Writes at most `most` bytes of a frame that has been begun into the ring.
SendState ShmLink::write(Outgoing& m, std::uint64_t most) {
  const std::uint64_t turn = m.total - m.sent > most ? m.sent + most : m.total;
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
SendState ShmLink::copy_to_arena(Outgoing& m, Copying& copying) {
  std::uint64_t copied = 0;
  awaits_chunk_ = false;
  for (; copying.segment < m.segments.size(); ++copying.segment) {
    OutSegment& s = m.segments[copying.segment];
    if (s.multicast && (s.lease = arena_->pass_multicast(s, *this)) != 0) continue;
    if (s.lease != 0) s.lease = Lease::is_returned(s.lease) ? peer_arena_->return_zero_copy(s) : arena_->pass_leased(s);
    if (s.lease != 0) continue;
    if (s.size < kMinArenaSegment) continue;
    if (!copying.allocation) copying.allocation = arena_->allocate(s.size);
    if (!copying.allocation) {
      const Arena::Growth growth = arena_->grow(*this);
      if (s.size < kMinWaitSize || growth == Arena::Growth::kNone) continue;
      awaits_chunk_ = growth == Arena::Growth::kOffered;
      return SendState::kBlocked;
    }
    turn_is_over_ = copied >= kArenaTurn;
    if (turn_is_over_) return SendState::kBlocked;
    const std::uint64_t size = std::min(s.size - copying.copied, kArenaTurn - copied);
    copy_to_shared(copying.allocation->data + copying.copied, s.data + copying.copied, size, s.size < kNonTemporalSize);
    copying.copied += size;
    copied += size;
    turn_is_over_ = copying.copied < s.size;
    if (turn_is_over_) return SendState::kBlocked;
    s.data = copying.allocation->data;
    s.lease = copying.allocation->lease;
    arena_->pass(s.lease);
    copying.allocation.reset();
    copying.copied = 0;
  }
  copying.segment = 0;
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

}  // namespace telegrad

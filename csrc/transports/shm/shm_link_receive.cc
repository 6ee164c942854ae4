// The receiving side of a shared-memory link: see shm_link.h.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "transports/shm/layout.h"
#include "transports/shm/seqpacket.h"
#include "transports/shm/shm_link.h"
#include "transports/stream/socket.h"

namespace telegrad {
namespace {

constexpr std::size_t kMinRead = 64 << 10;  // bytes of the ring read at once, at least

}  // namespace

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
      if (errno != ECONNRESET) fail(LinkError::of_call(errno));
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
    fail({e.what(), e.code().value()});
  }
}

void ShmLink::on_offer(std::uint32_t chunk, std::size_t size, UniqueFd passed) {
  const bool mapped = peer_arena_->map(chunk, size, std::move(passed));
  std::lock_guard lock(answers_mutex_);
  answers_.push_back({chunk, mapped});
  has_answers_.store(true, std::memory_order_relaxed);
  to_send_ = true;
}

BlockPtr ShmLink::map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) {
  if (frame.type == FrameType::kFragment || segment.lease == kFragmented) {
    return reassembler_.map_segment(frame, segment, inbox);
  }
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
  ReassemblingInbox reassembling(reassembler_, inbox);
  try {
    while (true) {
      const bool mapped = memory_ != nullptr;
      while (mapped) {
        const auto bytes = in_.peek();
        if (bytes.empty()) break;
        // The rest must be found again: the link is busy polled, or its wake-up is still pending.
        if (got >= budget && got > 0 && (busy_polled_ || !in_.sleeps())) return ReceiveState::kMore;
        const std::size_t size = std::min(bytes.size(), std::max(budget - std::min(budget, got), kMinRead));
        if (!reader_.read(bytes.data(), size, reassembling) || !reassembling.good()) {
          fail(reassembling.good() ? reader_.error() : kBadFragments);
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
      if (ended_) fail(reassembler_.waits() ? kEndedInMessage : reader_.end());
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

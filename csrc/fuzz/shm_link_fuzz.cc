// A shared-memory link whose peer writes any packet into its socket and any bytes into its memory.
//
// Input: steps of the peer (packets, offers of memory, control words, frames with leases, bytes in the ring) and of the
// link (receive, send, release what arrived, close).
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <new>
#include <vector>

#include "fuzz/inbox.h"
#include "fuzz/input.h"
#include "transports/shm/seqpacket.h"
#include "transports/shm/shm_link.h"

namespace telegrad::fuzz {
namespace {

constexpr std::size_t kChunk = 64 << 10;
constexpr std::size_t kBudget = std::size_t{1} << 20;

class HostilePeer {
 public:
  HostilePeer() {
    int pair[2];
    require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0, "there are sockets");
    socket_ = UniqueFd(pair[0]);
    memory_ = SharedMemory::create(kShmSize);
    memory_.reserve(0, kShmSize);
    control_ = new (memory_.data()) ShmControl{};
    writer_ = RingWriter(&control_->rings[0], memory_.data() + kShmRings, kShmRing);
    packet({.what = ShmPacket::kMemory, .number = kShmLayout, .size = kShmSize}, memory_.file());
    link_ = ShmLink::accept(UniqueFd(pair[1]), "fuzzed");
    link_->set_limits({.body = 4096, .message = 1 << 20, .segments = 8, .name = 64, .trailer = 256, .leased = 1 << 20});
  }

  void step(Input& in) {
    switch (in.byte() % 12) {
      case 0:
        return packet({.what = in.byte(), .number = in.byte(), .size = in.number<std::uint32_t>()}, -1);
      case 1:
        return offer(in);
      case 2: {
        const std::string_view bytes = in.take(in.byte() & 31);
        if (!bytes.empty()) send_packet(socket_.get(), bytes.data(), bytes.size(), -1);
        return;
      }
      case 3: {
        const std::size_t at = in.number<std::uint16_t>() * 8u % sizeof(ShmControl);
        return word(at).store(in.number<std::uint64_t>());
      }
      case 4: {  // a count that moves by little is more often valid
        const std::size_t at = (in.byte() & 1) * sizeof(RingControl) + (in.byte() & 1) * 64;
        word(offsetof(ShmControl, rings) + at) += in.number<std::int16_t>();
        return;
      }
      case 5:
        return frame(in);
      case 6:
        return put(in.take(in.byte()));
      case 7:
        return give_back(in);
      case 8:
        return receive();
      case 9:
        return send(in);
      case 10:
        return held_.clear();
      default:
        link_->trim(kNever);
        if (auto lease = link_->lease(in.number<std::uint16_t>())) leases_.push_back(std::move(*lease));
        return;
    }
  }

  void finish() {
    receive();
    link_->close();
    link_.reset();
    for (const Incoming& m : held_) touch(m);  // received memory stays valid
  }

 private:
  void packet(const ShmPacket& p, int passed) { send_packet(socket_.get(), &p, sizeof p, passed); }

  std::atomic<std::uint64_t>& word(std::size_t at) {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(memory_.data() + at / 8 * 8);
  }

  /// Offers memory: a good chunk, one of another size, or a file that is none.
  void offer(Input& in) {
    const std::uint8_t how = in.byte();
    const std::uint32_t number = (how & 0x80 ? kMulticastChunks : 0) + (how & 3);
    if (how & 4) return packet({.what = ShmPacket::kOffer, .number = number, .size = kChunk}, socket_.get());
    chunks_.push_back(SharedMemory::create(kChunk));
    if (!(how & 8)) chunks_.back().reserve(0, kChunk);
    packet({.what = ShmPacket::kOffer, .number = number, .size = how & 16 ? kChunk * 2 : kChunk},
           chunks_.back().file());
  }

  void put(std::string_view bytes) {
    if (writer_.broken() || writer_.room() < bytes.size()) return;
    writer_.put(bytes.data(), bytes.size());
    writer_.publish();
  }

  void frame(Input& in) {
    const std::uint8_t shape = in.byte();
    std::string bytes;
    const FrameHeader h{.type = shape & 0x80 ? FrameType::kReply : FrameType::kRequest,
                        .flags = static_cast<std::uint16_t>(shape & 0x40 ? kTrailer : 0),
                        .segment_count = shape & 7u};
    bytes.append(reinterpret_cast<const char*>(&h), sizeof h);
    for (std::uint32_t i = 0; i < h.segment_count; ++i) {
      const std::uint8_t where = in.byte();
      std::uint64_t lease =
          Lease::of((where & 0x80 ? kMulticastChunks : 0) + (where & 3), in.number<std::uint16_t>() * 64u);
      if (where & 0x40) lease |= Lease::kReturned;
      if (where & 0x20) lease = in.number<std::uint64_t>();
      const SegmentHeader segment{.size = in.number<std::uint16_t>(), .lease = lease};
      bytes.append(reinterpret_cast<const char*>(&segment), sizeof segment);
    }
    put(bytes);
  }

  /// Returns a lease of the link's arena, true or false.
  void give_back(Input& in) {
    ReleaseQueue& releases = control_->releases[1];
    const std::uint64_t returned = releases.returned;
    const std::uint8_t which = in.byte();
    releases.leases[returned % ReleaseQueue::kSlots] =
        which & 0x80 ? in.number<std::uint64_t>() : Lease::of(which & 3, in.byte() * 4096u);
    releases.returned = returned + 1;
  }

  void receive() {
    SmallInbox inbox(1 << 20);
    for (int turns = 0; turns < 4; ++turns) {
      const ReceiveState state = link_->receive(inbox, kBudget);
      if (state == ReceiveState::kToSend) link_->flush();
      if (state == ReceiveState::kIdle || state == ReceiveState::kBroken) break;
    }
    for (Incoming& m : inbox.messages) {
      touch(m);
      held_.push_back(std::move(m));
    }
  }

  static void touch(const Incoming& m) {
    for (const BlockPtr& s : m.segments) {
      for (std::size_t i = 0; i < s->size(); i += 512) s->data()[i] = static_cast<std::byte>(i);
    }
  }

  /// Sends bytes, or memory that arrived, without a copy.
  void send(Input& in) {
    const std::uint8_t what = in.byte();
    const std::string bytes(std::size_t{in.number<std::uint16_t>()} * 2, 'l');
    Outgoing m;
    m.header.type = what & 1 ? FrameType::kReply : FrameType::kRequest;
    m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
    if (what & 2 && !held_.empty() && !held_.back().segments.empty()) {
      const Block& block = *held_.back().segments.back();
      m.segments.push_back({block.data(), block.size(), block.lease()});
    }
    if (what & 4 && !leases_.empty()) {
      const LinkLease& leased = leases_.back();
      m.segments.push_back({leased.memory->data(), leased.memory->size(), leased.lease});
    }
    for (int turns = 0; turns < 4 && link_->send(m) == SendState::kBlocked; ++turns) receive();
    if (what & 4 && !leases_.empty()) leases_.pop_back();
    if (what & 2 && !held_.empty()) held_.pop_back();
    m.segments.clear();
  }

  UniqueFd socket_;
  SharedMemory memory_;
  ShmControl* control_ = nullptr;
  RingWriter writer_;
  std::vector<SharedMemory> chunks_;
  std::unique_ptr<ShmLink> link_;
  std::vector<Incoming> held_;
  std::vector<LinkLease> leases_;
};

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace telegrad::fuzz;
  Input in(data, size);
  HostilePeer peer;
  for (int steps = 0; steps < 64 && !in.empty(); ++steps) peer.step(in);
  peer.finish();
  return 0;
}

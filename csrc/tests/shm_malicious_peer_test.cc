// Shared-memory links with a malicious peer: false counts, leases, memory and packets.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "tests/links.h"
#include "transports/shm/seqpacket.h"
#include "transports/shm/shm_link.h"

namespace telegrad::test {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

/// A link with this test as its peer, which accesses the memory of the link.
struct MaliciousPeer {
  MaliciousPeer() {
    int pair[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    socket = UniqueFd(pair[0]);
    memory = SharedMemory::create(kShmSize);
    memory.reserve(0, kShmSize);
    control = new (memory.data()) ShmControl{};
    writer = RingWriter(&control->rings[0], memory.data() + kShmRings, kShmRing);
    send({.what = ShmPacket::kMemory, .number = kShmLayout, .size = kShmSize}, memory.file());
    link = ShmLink::accept(UniqueFd(pair[1]), "test");
    link->set_limits(Limits{});
  }
  void send(const ShmPacket& packet, int passed = -1) { write(&packet, sizeof packet, passed); }
  /// Offers a chunk of one size, which the link answers.
  void offer(int file) {
    send({.what = ShmPacket::kOffer, .number = 1, .size = kChunk}, file);
    CHECK(link->receive(inbox, kAnyBudget) == ReceiveState::kToSend);
    CHECK(link->flush() == SendState::kSent);
  }
  void write(const void* data, std::size_t size, int passed = -1) {
    CHECK_EQ(send_packet(socket.get(), data, size, passed), 0);
  }
  void frame(const SegmentHeader& segment) {
    FrameHeader h;
    h.type = FrameType::kRequest;
    h.segment_count = 1;
    writer.put(&h, sizeof h);
    writer.put(&segment, sizeof segment);
    writer.publish();
  }
  void check_broken(const std::string& why) {
    receive_until_broken_at_once();
    CHECK_SAYS(link->error().text, why);
    CHECK(inbox.messages.empty());
  }
  void receive_until_broken_at_once() {
    for (int i = 0; link->receive(inbox, kAnyBudget) != ReceiveState::kBroken; ++i) CHECK(i < 10);
  }
  /// Returns the packets that the link has sent.
  bool hears(std::uint32_t what) {
    while (true) {
      ShmPacket packet;
      const ssize_t n = ::recv(socket.get(), &packet, sizeof packet, MSG_DONTWAIT);
      if (n < 0) return false;
      if (n == sizeof packet && packet.what == what) return true;
    }
  }
  UniqueFd socket;
  SharedMemory memory;
  ShmControl* control = nullptr;
  RingWriter writer;
  std::unique_ptr<ShmLink> link;
  RecordingInbox inbox;
};

CASE(false_counts_break_the_link) {
  for (const std::uint64_t forgery : {std::uint64_t{kShmRing + 1}, ~std::uint64_t{0}}) {
    MaliciousPeer l;
    l.control->rings[0].written = forgery;
    l.check_broken("corrupted");
  }
  MaliciousPeer l;
  l.control->rings[1].read = 12345;
  const Message m;
  Outgoing out = m.outgoing();
  CHECK(l.link->send(out) == SendState::kBroken);
}

CASE(unknown_leases_break_the_link) {
  SharedMemory chunk = SharedMemory::create(kChunk);
  chunk.reserve(0, kChunk);
  struct Forgery {
    std::uint64_t size, lease;
  };
  const Forgery forgeries[] = {{100, Lease::of(7, 0)},
                               {100, Lease::of(1, kChunk)},
                               {kChunk + 1, Lease::of(1, 0)},
                               {kPage + 1, Lease::of(1, kChunk - kPage)},
                               {100, Lease::of(1, 0) | ~std::uint64_t{0} >> 32},
                               {100, Lease::of(kMulticastChunks, 0)}};
  for (const Forgery& forgery : forgeries) {
    MaliciousPeer l;
    l.offer(chunk.file());
    CHECK(l.hears(ShmPacket::kMapped));
    l.frame({.size = forgery.size, .lease = forgery.lease});
    l.check_broken("has not been shared");
  }
  MaliciousPeer l;  // valid leases do not break it
  l.offer(chunk.file());
  l.frame({.size = kPage, .lease = Lease::of(1, kChunk - kPage)});
  CHECK(l.link->receive(l.inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK_EQ(l.inbox.messages[0].segments[0]->size(), kPage);
}

/// A peer returns memory that it does not have, has not received, or has returned already.
CASE(invalid_zero_copy_returns_break_the_link) {
  constexpr std::size_t kSize = 100 << 10;
  const std::uint64_t lease = Lease::kReturned | Lease::of(1, 0);
  struct Handing {
    Handing() {
      for (int i = 0; i < 2; ++i) {  // there is no chunk yet for the first one
        const std::string bytes(kSize, 'a');
        Outgoing m;
        m.header.type = FrameType::kRequest;
        m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), kSize});
        CHECK(l.link->send(m) == SendState::kSent);
        handed = m.segments[0].lease != 0;
        if (!handed) l.send({.what = ShmPacket::kMapped, .number = 1, .size = 0});
        l.link->receive(l.inbox, kAnyBudget);
        CHECK_EQ(handed, i == 1);
      }
    }
    MaliciousPeer l;
    bool handed = false;
  };
  const SegmentHeader forgeries[] = {{kSize, lease + (std::uint64_t{1} << Lease::kOffsetBits)},
                                     {kSize, Lease::kReturned | Lease::of(1, kChunk)},
                                     {kChunk, lease},
                                     {kSize, Lease::kReturned | Lease::of(1, kSize / 2)},
                                     {kSize, Lease::kReturned | Lease::of(kMulticastChunks, 0)}};
  for (const SegmentHeader& forgery : forgeries) {
    Handing h;
    h.l.frame(forgery);
    h.l.check_broken("has not been shared");
  }
  MaliciousPeer never;
  never.frame({kSize, lease});
  never.check_broken("has not been shared");
  Handing twice;
  twice.l.frame({kSize, lease});
  CHECK(twice.l.link->receive(twice.l.inbox, kAnyBudget) == ReceiveState::kIdle);
  CHECK_EQ(twice.l.inbox.messages[0].segments[0]->size(), kSize);
  const BlockPtr block = std::move(twice.l.inbox.messages[0].segments[0]);  // held by the program
  twice.l.inbox.messages.clear();
  twice.l.frame({kSize, lease});
  twice.l.check_broken("has not been shared");
  Handing both;  // returned with a message and as a lease
  both.l.frame({kSize, lease});
  CHECK(both.l.link->receive(both.l.inbox, kAnyBudget) == ReceiveState::kIdle);
  ReleaseQueue& releases = both.l.control->releases[1];
  releases.leases[0] = Lease::of(1, 0);
  releases.returned = 1;
  const std::string bytes(kSize, 'b');
  Outgoing m;
  m.header.type = FrameType::kRequest;
  m.segments.push_back({reinterpret_cast<const std::byte*>(bytes.data()), kSize});
  CHECK(both.l.link->send(m) == SendState::kBroken);
}

CASE(memory_that_could_be_truncated_is_rejected) {
  UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(::ftruncate(unsealed.get(), kChunk), 0);
  UniqueFd hollow(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));  // sealed, but not reserved
  CHECK_EQ(::ftruncate(hollow.get(), kChunk), 0);
  CHECK_EQ(::fcntl(hollow.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  SharedMemory small = SharedMemory::create(kChunk / 2);
  small.reserve(0, kChunk / 2);
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  for (const int fd : {unsealed.get(), hollow.get(), small.file(), file.get(), -1}) {
    MaliciousPeer l;
    l.offer(fd);
    CHECK(l.hears(ShmPacket::kRefused));
  }
}

CASE(false_returns_break_the_link) {
  const std::function<void(ReleaseQueue&)> forgeries[] = {
      [](ReleaseQueue& r) { r.returned = 1; },                         // nothing was passed on
      [](ReleaseQueue& r) { r.returned = ReleaseQueue::kSlots + 1; },  // more than the list has
      [](ReleaseQueue& r) { r.returned = ~std::uint64_t{0}; },
  };
  for (const auto& forgery : forgeries) {
    MaliciousPeer l;
    forgery(l.control->releases[1]);
    Random random(5);
    const Message m = random_message(random, 10, {kChunk});
    Outgoing out = m.outgoing();
    CHECK(l.link->send(out) == SendState::kBroken);
  }
}

CASE(malformed_packets_break_the_link) {
  for (const std::uint32_t what : {0u, 1u, 77u}) {
    MaliciousPeer l;
    l.send({.what = what, .number = 1, .size = 1});
    l.receive_until_broken_at_once();
  }
  MaliciousPeer l;
  l.write("some text", 9);
  l.check_broken("not a packet");
  MaliciousPeer many;  // answers without an offer are ignored
  for (const std::uint32_t what : {ShmPacket::kMapped, ShmPacket::kRefused, ShmPacket::kDrop}) {
    many.send({.what = what, .number = 3, .size = 0});
  }
  CHECK(many.link->receive(many.inbox, kAnyBudget) != ReceiveState::kBroken);
}

CASE(a_peer_that_overwrites_memory_breaks_only_the_link) {
  const int rounds = times(300);
  for (int round = 0; round < rounds; ++round) {
    MaliciousPeer l;
    Random random(static_cast<std::uint64_t>(round) + 100);
    const Message m = random_message(random, 500, {1000}, 20);
    std::string bytes = random.bytes(kShmRing / 2);
    l.writer.put(bytes.data(), bytes.size());
    l.writer.publish();
    for (int i = 0; i < 50; ++i) {
      const std::size_t at = random.below(sizeof(ShmControl) / 8) * 8;
      reinterpret_cast<std::atomic<std::uint64_t>*>(l.memory.data() + at)->store(random.next());
    }
    l.link->receive(l.inbox, kAnyBudget);
    Outgoing out = m.outgoing();
    l.link->send(out);
  }
}

}  // namespace
}  // namespace telegrad::test

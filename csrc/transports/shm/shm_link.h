// A link between two processes of one host: frames go through one ring of shared memory per direction.
//
// A Unix socket of packets supervises the link: the kernel reports the user of the other end, and at once when that
// process has ended. Descriptors are passed over it, and its packets wake an end that sleeps. While both ends are
// awake, nothing is sent over it. Large segments do not go through the ring: they are copied once into shared memory,
// where the receiver uses them in place (arena.h, peer_arena.h). Other messages are sent while one is copied. Segments
// for which there is no such memory go through the ring in fragments (transports/fragments).
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "base/unique_fd.h"
#include "memory/arena.h"
#include "memory/peer_arena.h"
#include "memory/shared_memory.h"
#include "transports/fragments/fragments.h"
#include "transports/fragments/reassembler.h"
#include "transports/frames.h"
#include "transports/shm/layout.h"
#include "transports/shm/ring.h"
#include "transports/shm/unread_frames.h"

namespace telegrad {

class ShmLink final : public Link, private SegmentSource, private Arena::Messenger {
 public:
  /// Makes the connecting end, over a connected socket: creates the memory and passes it to the other end. Throws
  /// std::system_error.
  static std::unique_ptr<ShmLink> connect(UniqueFd socket, std::string description);
  /// Makes the accepting end, which gets the memory with the first packet.
  static std::unique_ptr<ShmLink> accept(UniqueFd socket, std::string description);
  ~ShmLink() override;

  int fd() const override { return socket_.get(); }
  SendState send(Outgoing& message) override;
  bool is_large(const Outgoing& message) const override;
  SendState send_between(Outgoing& message) override;
  bool buffer(const Outgoing& message) override;
  SendState flush() override;
  std::optional<LinkLease> lease(std::size_t size) override;
  bool announce(const MulticastBuffer& buffer) override;
  std::size_t lease_capacity() const override;
  void trim(Nanos before) override;
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  bool enable_busy_poll() override;
  bool ready() override;
  bool arm_wakeup() override;
  bool waits_for_fd() const override { return !awaits_chunk_; }
  bool may_continue() const override { return turn_is_over_; }
  void set_limits(const Limits& limits) override;
  void set_budget(const std::shared_ptr<MemoryBudget>& budget) override;
  void close() override;
  LinkError error() const override;
  PeerCredentials peer_credentials(CredentialLookup& lookup) const override;
  std::uint64_t received_bytes() const override;
  std::uint64_t unread_bytes() const override { return unread_.bytes(read_by_peer()); }
  std::string describe() const override { return description_; }

 private:
  static constexpr unsigned kPackets = 16;  // packets received with one system call

  ShmLink(UniqueFd socket, std::string description, int end);
  static void check_user(int socket, const std::string& description);
  void use(SharedMemory memory);
  void fail(LinkError why);
  SendState fail_to_send();
  bool is_open() const;
  bool publish();
  SendState blocked();
  struct Copying {
    std::size_t segment = 0;  // segments before it have been placed
    std::optional<Arena::Allocation> allocation;
    std::uint64_t copied = 0;
  };
  SendState send_frame(Outgoing& message, Copying& copying);
  SendState send_fragments(Outgoing& message);
  SendState send_fragment(const Outgoing& message);
  SendState write(Outgoing& frame, std::uint64_t most);
  SendState copy_to_arena(Outgoing& message, Copying& copying);
  static void fragment(Outgoing& message);
  void note_unread(const Outgoing& message);
  std::uint64_t read_by_peer() const;
  void receive_packets(unsigned most = kPackets);
  void on_packet(const std::byte* packet, std::size_t size, UniqueFd passed);
  void on_offer(std::uint32_t chunk, std::size_t size, UniqueFd passed);
  void map_link_memory(std::uint64_t size, UniqueFd passed);
  bool answer_offers();
  ReceiveState idle();
  BlockPtr map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override;
  void discard(const Block* trailer) override { reassembler_.discard(trailer); }
  bool offer(std::uint32_t chunk, std::size_t size, int file) override;
  bool drop(std::uint32_t chunk) override;

  const UniqueFd socket_;
  const std::string description_;
  const int end_;  // 0: the connecting end
  Limits limits_;
  std::shared_ptr<MemoryBudget> budget_;
  std::shared_ptr<Arena> arena_;           // this end's memory for the peer
  std::shared_ptr<PeerArena> peer_arena_;  // the peer's memory. Both keep alive the memory that they need
  std::shared_ptr<SharedMemory> memory_;
  std::atomic<ShmControl*> shared_ = nullptr;  // null: not received yet

  mutable std::mutex error_mutex_;
  LinkError error_;
  std::atomic<bool> broken_ = false;

  // Sending thread only.
  RingWriter out_;
  bool send_broken_ = false;
  bool awaits_chunk_ = false;  // the peer has been offered a chunk for the message being sent
  bool turn_is_over_ = false;  // see may_continue
  FrameBuffer buffered_;
  struct {
    Outgoing* message = nullptr;  // the large message that is being sent
    bool framed = false;          // its frame has been sent
    Copying copying;
    Fragment fragment;
  } large_;
  Copying copying_;  // of a message that is not large
  Fragmenter fragmenter_;

  // Receiving thread only.
  RingReader in_;
  FrameReader reader_{this};
  Reassembler reassembler_;
  bool busy_polled_ = false;  // it is busy polled
  bool ended_ = false;        // the other end has closed
  bool to_send_ = false;      // the sending thread can continue: see ReceiveState::kToSend

  mutable UnreadFrames unread_;

  // From the receiving thread to the sending thread.
  struct Answer {
    std::uint32_t chunk;
    bool mapped;
  };
  std::mutex answers_mutex_;
  std::vector<Answer> answers_;  // answers to offers, not sent yet
  std::atomic<bool> has_answers_ = false;
};

}  // namespace telegrad

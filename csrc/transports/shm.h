// A link between two processes of one host: frames go through one ring of shared memory per direction.
//
// A Unix socket of packets supervises the link: the kernel reports the user of the other end, and at once when that
// process has ended. Descriptors are passed over it, and its packets wake an end that sleeps. While both ends are
// awake, nothing is sent over it. Large segments do not go through the ring: they are copied once into shared memory,
// where the receiver uses them in place (arena.h, borrowed.h).
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "transports/arena.h"
#include "transports/borrowed.h"
#include "transports/descriptor.h"
#include "transports/frames.h"
#include "transports/ring.h"
#include "transports/shared_memory.h"
#include "transports/shm_layout.h"

namespace telegrad {

class ShmLink final : public Link, private Leases, private Arena::Messenger {
 public:
  /// Makes the connecting end, over a connected socket: creates the memory and passes it to the other end. Throws
  /// std::system_error.
  static std::unique_ptr<ShmLink> connect(Descriptor socket, std::string description);
  /// Makes the accepting end, which gets the memory with the first packet.
  static std::unique_ptr<ShmLink> accept(Descriptor socket, std::string description);
  ~ShmLink() override;

  int fd() const override { return socket_.get(); }
  SendState send(Outgoing& message) override;
  bool hold(const Outgoing& message) override;
  SendState release() override;
  std::optional<Lent> lend(std::size_t size) override;
  bool prepare(const Common& piece) override;
  std::size_t lendable() const override;
  void trim(Nanos before) override;
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  bool stay_awake() override;
  bool ready() override;
  bool fall_asleep() override;
  bool waits_for_fd() const override { return !awaits_room_; }
  void set_limits(const Limits& limits) override;
  void close() override;
  std::string error() const override;
  PeerUser peer_user(UserLookup& lookup) const override;
  std::string describe() const override { return description_; }

 private:
  static constexpr unsigned kPackets = 16;  // packets received with one system call

  ShmLink(Descriptor socket, std::string description, int end);
  void use(SharedMemory memory);
  void fail(std::string why);
  SendState fail_to_send();
  bool is_open() const;
  bool publish();
  SendState blocked();
  SendState place(Outgoing& message);
  void hear(unsigned most = kPackets);
  void on_packet(const std::byte* packet, std::size_t size, Descriptor passed);
  void on_offer(std::uint32_t chunk, std::size_t size, Descriptor passed);
  void take_memory(std::uint64_t size, Descriptor passed);
  bool answer_offers();
  ReceiveState idle();
  BlockPtr borrow(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) override;
  bool offer(std::uint32_t chunk, std::size_t size, int file) override;
  bool drop(std::uint32_t chunk) override;

  const Descriptor socket_;
  const std::string description_;
  const int end_;  // 0: the connecting end
  Limits limits_;
  std::shared_ptr<Arena> arena_;        // this end's memory for the peer
  std::shared_ptr<Borrower> borrower_;  // the peer's memory. Both keep alive the memory that they need
  std::shared_ptr<SharedMemory> memory_;
  std::atomic<ShmControl*> shared_ = nullptr;  // null: not received yet

  mutable std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> broken_ = false;

  // Sending thread only.
  RingWriter out_;
  bool send_broken_ = false;
  bool awaits_room_ = false;  // the peer has been offered a chunk for the message being sent
  HeldFrames held_;
  struct {
    std::size_t segment = 0;  // of the message being sent: segments before it have been placed
    std::optional<Arena::Place> place;
    std::uint64_t copied = 0;
  } placing_;

  // Receiving thread only.
  RingReader in_;
  FrameReader reader_{this};
  bool awake_ = false;    // it is busy polled
  bool ended_ = false;    // the other end has closed
  bool to_send_ = false;  // the sending thread can continue: see ReceiveState::kToSend

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

// A link between two processes of one host: frames go through a ring of shared memory each way.
//
// A Unix socket (of packets) is the lifeline: the kernel says whose process is at the other end, and at once when it is
// gone. Over it pass descriptors, and its packets are the doorbell of an end that sleeps. While both ends are awake
// nothing goes over it. Large segments do not go through the ring: they are copied into shared memory once, where the
// receiver uses them (arena.h, borrowed.h).
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
  /// The connecting end, over a connected socket: makes the memory and passes it to the other. Throws
  /// std::system_error.
  static std::unique_ptr<ShmLink> connect(Descriptor socket, std::string description);
  /// The other end, which gets the memory with the first packet.
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
  static constexpr unsigned kPackets = 16;  // of the socket, taken in by one system call

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
  const int end_;  // 0: the connecting one
  Limits limits_;
  std::shared_ptr<Arena> arena_;        // what we lend,
  std::shared_ptr<Borrower> borrower_;  // and what we are lent. These two keep the memory that they need
  std::shared_ptr<SharedMemory> memory_;
  std::atomic<ShmControl*> shared_ = nullptr;  // null: it has not come yet

  mutable std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> broken_ = false;

  // The sending thread's.
  RingWriter out_;
  bool send_broken_ = false;
  bool awaits_room_ = false;  // the peer has been offered memory that what is being sent needs
  HeldFrames held_;
  struct {
    std::size_t segment = 0;  // of the message being sent: those before it are in their places
    std::optional<Arena::Place> place;
    std::uint64_t copied = 0;
  } placing_;

  // The receiving thread's.
  RingReader in_;
  FrameReader reader_{this};
  bool awake_ = false;    // it looks into the ring by itself
  bool ended_ = false;    // the other end has gone
  bool to_send_ = false;  // something for the sending thread has come: see ReceiveState::kToSend

  // For the sending thread, from the receiving one.
  struct Answer {
    std::uint32_t chunk;
    bool mapped;
  };
  std::mutex answers_mutex_;
  std::vector<Answer> answers_;  // to offers, not sent yet
  std::atomic<bool> has_answers_ = false;
};

}  // namespace telegrad

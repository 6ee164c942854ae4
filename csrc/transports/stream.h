// One link over any connected byte-stream socket. Unix and TCP differ only in how the socket comes to be.
#pragma once

#include <atomic>
#include <string>

#include "transports/descriptor.h"
#include "transports/frames.h"

namespace telegrad {

/// What links over one kind of socket do differently.
struct SocketKind {
  PeerUser (*peer_user)(int fd, UserLookup& lookup);
  std::string (*source)(int fd) = nullptr;  // see Link; else this machine
  void (*before_much)(int fd) = nullptr;    // called once, before the first large message, or a piece of one, is sent
};

class StreamLink final : public Link {
 public:
  /// `connecting`: the socket's connect() is still under way.
  StreamLink(Descriptor socket, std::string description, bool connecting, const SocketKind& kind);
  ~StreamLink() override;

  int fd() const override { return socket_.get(); }
  SendState send(Outgoing& message) override;
  bool hold(const Outgoing& message) override;
  SendState release() override;
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  void set_limits(const Limits& limits) override { reader_.set_limits(limits); }

  /// From now on segments with leases, and pieces of messages, mean something at both ends.
  void set_leases(Leases* leases);

  /// Nothing more is sent; the other end sees the end. What it has sent is still received.
  void stop_sending();
  void close() override;
  std::string error() const override;
  PeerUser peer_user(UserLookup& lookup) const override { return kind_.peer_user(socket_.get(), lookup); }
  std::string source() const override { return kind_.source ? kind_.source(socket_.get()) : std::string(); }
  std::string describe() const override { return description_; }

 private:
  bool finish_connecting();
  void fail(std::string why);
  void fail_locked(std::string why);
  SendState fail_to_send(int error);

  Descriptor socket_;
  const std::string description_;
  const SocketKind& kind_;
  std::atomic<bool> connecting_;

  mutable std::mutex error_mutex_;
  std::string error_;
  std::string send_error_;  // why nothing can be sent, unless it is that the other end has gone
  std::atomic<bool> broken_ = false;

  // The sending thread's.
  bool send_broken_ = false;
  bool sent_much_ = false;
  std::atomic<bool> leases_ = false;
  HeldFrames held_;

  FrameReader reader_;
  std::unique_ptr<std::byte[]> buffer_;  // what is read on its way to the reader
};

}  // namespace telegrad

// A link over any connected byte stream. Unix, TCP and TLS differ only in how the stream is made.
#pragma once

#include <atomic>
#include <string>

#include "transports/frames.h"
#include "transports/stream/byte_stream.h"

namespace telegrad {

/// Differences between kinds of sockets.
struct SocketKind {
  PeerCredentials (*peer_credentials)(int fd, CredentialLookup& lookup);
  std::string (*source)(int fd) = nullptr;  // see Link::source; null: this host
  void (*before_large)(int fd) = nullptr;   // called once, before the first large message or fragment is sent
  void (*set_silence_limit)(int fd, Nanos limit) = nullptr;  // see Link::set_silence_limit; null: the kernel reports it
};

class StreamLink final : public Link {
 public:
  /// `connecting`: the socket's connect() is still in progress.
  StreamLink(std::unique_ptr<ByteStream> stream, std::string description, bool connecting, const SocketKind& kind);
  ~StreamLink() override;

  int fd() const override { return stream_->fd(); }
  bool waits_for_fd() const override { return !stream_->waits_for_input(); }
  SendState send(Outgoing& message) override;
  bool buffer(const Outgoing& message) override;
  SendState flush() override;
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  void set_limits(const Limits& limits) override { reader_.set_limits(limits); }

  /// Enables segments with leases, and fragments, at both ends.
  void set_segment_source(SegmentSource* source);

  /// Closes the sending direction; the other end sees the end of stream. Data from the other end is still received.
  void stop_sending();
  void close() override;
  LinkError error() const override;
  bool violated() const override { return violated_; }
  PeerCredentials peer_credentials(CredentialLookup& lookup) const override {
    return kind_.peer_credentials(fd(), lookup);
  }
  std::uint64_t received_bytes() const override { return received_.load(std::memory_order_relaxed); }
  void set_silence_limit(Nanos limit) override {
    if (kind_.set_silence_limit) kind_.set_silence_limit(fd(), limit);
  }
  std::string source() const override { return kind_.source ? kind_.source(fd()) : std::string(); }
  std::string describe() const override { return description_; }
  bool is_certified_for(std::string_view name) const override { return stream_->is_certified_for(name); }

 private:
  bool finish_connecting();
  void fail(LinkError why);
  void fail_locked(LinkError why);
  SendState fail_to_send(int error);
  LinkError reason(int error) const;
  SendState flush_stream();
  ReceiveState nothing_to_read();

  const std::unique_ptr<ByteStream> stream_;
  const std::string description_;
  const SocketKind& kind_;
  std::atomic<bool> connecting_;

  mutable std::mutex error_mutex_;
  LinkError error_;
  LinkError send_error_;  // why sending fails; empty if the other end has closed
  std::atomic<bool> broken_ = false;
  std::atomic<bool> violated_ = false;

  // Sending thread only.
  bool send_broken_ = false;
  bool sent_large_ = false;
  std::atomic<bool> has_segment_source_ = false;
  FrameBuffer buffered_;

  std::atomic<std::uint64_t> received_ = 0;  // written by the receiving thread
  FrameReader reader_;
  std::unique_ptr<std::byte[]> buffer_;  // received bytes for the parser
};

}  // namespace telegrad

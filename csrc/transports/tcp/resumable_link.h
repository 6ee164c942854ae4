// A link whose messages outlive its connection: TCP and TLS.
//
// From the end of the handshake on, the link counts the messages of both directions and keeps those that it has sent,
// until the other end acknowledges them (delivery.h). If the connection breaks, the engine suspends the link, makes
// another connection (core/peers_resume.cc), in whose handshake both ends state how many messages have arrived, and
// continues the link on it. The rest is sent again, so each message is delivered once. Others are sent between the
// parts of a large one, by the order rules (core/delivery_order.h). While it is suspended, the link blocks every
// message.
//
// Acknowledgements are frames of type kAck without a number: call_id and timeout are `count` and `end` of an
// Acknowledgement. They go between two messages, or between the parts of a large one.
//
// A message with memory that may have changed is sent again once it has been verified (Resumable::verify); those behind
// it wait, because their numbers are not sent.
//
// If the engine does not want this (`keep`), the link only passes everything on.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/resumable.h"
#include "core/transport.h"
#include "transports/tcp/delivery.h"

namespace telegrad {

class ResumableLink final : public Link, public Resumable {
 public:
  explicit ResumableLink(std::unique_ptr<Link> connection) : link_(std::move(connection)) {}

  int fd() const override { return current()->fd(); }
  SendState send(Outgoing& message) override;
  bool is_large(const Outgoing& message) const override { return current()->is_large(message); }
  SendState send_between(Outgoing& message) override;
  bool takes_between() override;
  bool buffer(const Outgoing& message) override;
  SendState flush() override;
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  bool wants_lanes() const override { return !suspended_ && current()->wants_lanes(); }
  bool add_lane(std::shared_ptr<Link> lane) override;
  std::size_t lanes() const override { return current()->lanes(); }
  int lanes_fd() const override { return current()->lanes_fd(); }
  void poll_lanes() override { link_->poll_lanes(); }
  bool waits_for_fd() const override { return (waits_for_link_ || large_again_) && link_->waits_for_fd(); }
  bool sends_again() const override { return large_again_ != nullptr; }
  std::vector<int> descriptors() const override;
  void set_limits(const Limits& limits) override;
  void close() override;
  LinkError error() const override;
  PeerCredentials peer_credentials(CredentialLookup& lookup) const override {
    return current()->peer_credentials(lookup);
  }
  std::uint64_t received_bytes() const override;
  void set_silence_limit(Nanos limit) override { current()->set_silence_limit(limit); }
  std::string source() const override { return current()->source(); }
  std::string describe() const override { return current()->describe(); }
  bool is_certified_for(std::string_view name) const override { return current()->is_certified_for(name); }
  Resumable* resumable() override { return this; }

  void keep() override { keeps_ = true; }
  bool may_resume() const override;
  std::uint64_t suspend() override;
  bool resume(Link& connection, std::uint64_t received) override;
  void release(std::uint64_t call, Released& released) override;
  bool has_unverified() const override;
  void verify() override;
  bool give_up_verifying() override;
  Waiting waiting() const override;

 private:
  class NumberedInbox;

  /// A message that is being sent by `send` or `send_between`.
  struct Place {
    std::uint64_t number = UINT64_MAX;
    bool begun = false;    // it has its number, and part of it may have been sent,
    bool rewinds = false;  // on an earlier connection: it begins again
    bool large = false;
    bool sent = false;            // `send_again` has sent the rest of it
    Outgoing* message = nullptr;  // the caller's, if it is large

    bool is_under_way() const { return begun && !rewinds; }
  };

  std::shared_ptr<Link> current() const {
    std::lock_guard lock(mutex_);
    return link_;
  }
  SendState send(Outgoing& message, Place& place);
  bool begin(const Outgoing& message, Place& place);
  SendState transmit(Outgoing& message, Place& place);
  void end(Outgoing& message, Place& place);
  bool has_arrived(const Place& place) const { return place.rewinds && place.number < resumed_at_; }
  SendState send_again();
  SendState send_next_again();
  SendState send_large_again();
  bool may_pass_large(const Outgoing& message) const;
  SendState send_ack();
  void take(Incoming&& message, Inbox& inbox);
  void on_ack(const Acknowledgement& arrived);
  void fail(LinkError why);

  // Replaced by the receiving thread while no sender is inside; so both read it without the lock.
  mutable std::mutex mutex_;
  std::shared_ptr<Link> link_;
  std::uint64_t bytes_before_ = 0;  // received on earlier connections; under mutex_
  LinkError error_;                 // under mutex_
  std::atomic<bool> violated_ = false;

  std::atomic<bool> keeps_ = false;
  std::atomic<bool> suspended_ = false;
  std::atomic<bool> closed_ = false;
  Limits limits_;

  // Messages that have been sent. A leaf lock: the receiving thread takes it for acknowledgements.
  mutable std::mutex kept_mutex_;
  Unacknowledged unacknowledged_;
  Released released_;  // of messages that have arrived; destroyed by the receiving thread
  bool waits_for_room_ = false;
  bool incomplete_ = false;      // there was no memory for a copy, so the link cannot be resumed
  Acknowledgement arrived_now_;  // what to acknowledge

  // Sending thread only.
  Place front_, between_;
  bool waits_for_link_ = true;        // see waits_for_fd
  bool waits_for_check_ = false;      // the next message to send again has not been verified
  std::uint64_t again_ = UINT64_MAX;  // next message to send again; UINT64_MAX: none
  std::uint64_t resumed_at_ = 0;      // number of the first message that is sent on this connection
  std::unique_ptr<Outgoing> message_again_;
  std::unique_ptr<Outgoing> large_again_;  // a large one before it, between whose parts others are sent
  std::optional<Outgoing> ack_;            // an acknowledgement of which a part may have been sent

  // Receiving thread only.
  Received received_;
  std::uint64_t base_ = 0;              // number of the first message of this connection
  std::vector<Incoming> arrived_;       // read together with the end of the handshake that continued this link
  ResumableLink* continues_ = nullptr;  // the link that has taken over this link's connection
  std::vector<std::shared_ptr<Link>> retired_;

  std::atomic<bool> ack_due_ = false;
};

}  // namespace telegrad

// A link that applies the rules of core/faults.h to what it sends. What it receives is unchanged: the other end has
// rules of its own.
//
// The contract of links holds, except for messages that a rule is about: order, and each message once. So a dropped
// message ends the connection. A held message counts as blocked, with those behind it; a timerfd, polled like the
// descriptor of lanes, has the engine try again. Such a link has no lanes, and copies no small messages into a buffer.
//
// A rule that ends a connection breaks the socket beneath, so a link that outlives its connection (core/resumable.h)
// continues on another one, and sends what was dropped again.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "core/faults.h"
#include "core/resumable.h"
#include "core/transport.h"

namespace telegrad {

class FaultyLink final : public Link, public HeldLink, public Resumable {
 public:
  FaultyLink(std::unique_ptr<Link> inner, FaultsPtr faults);
  ~FaultyLink() override;

  int fd() const override { return inner_->fd(); }
  SendState send(Outgoing& message) override { return send(message, front_); }
  bool is_large(const Outgoing& message) const override { return inner_->is_large(message); }
  bool may_continue() const override { return !is_held() && inner_->may_continue(); }
  SendState send_between(Outgoing& message) override { return send(message, between_); }
  bool takes_between() override { return inner_->takes_between(); }
  SendState flush() override;
  bool sends_again() const override { return inner_->sends_again(); }
  bool waits_for_fd() const override { return !is_held() && inner_->waits_for_fd(); }
  ReceiveState receive(Inbox& inbox, std::size_t budget) override { return inner_->receive(inbox, budget); }
  int lanes_fd() const override { return timer_.get(); }
  void poll_lanes() override;
  std::vector<int> descriptors() const override;
  void set_peer_name(std::string_view name) override;
  void close() override { inner_->close(); }
  LinkError error() const override;
  void release() override;

  std::optional<LinkLease> lease(std::size_t size) override { return inner_->lease(size); }
  bool announce(const MulticastBuffer& multicast) override { return inner_->announce(multicast); }
  std::size_t lease_capacity() const override { return inner_->lease_capacity(); }
  void trim(Nanos before) override { inner_->trim(before); }
  bool enable_busy_poll() override { return inner_->enable_busy_poll(); }
  bool ready() override { return inner_->ready(); }
  bool arm_wakeup() override { return inner_->arm_wakeup(); }
  void set_limits(const Limits& limits) override { inner_->set_limits(limits); }
  void set_budget(const std::shared_ptr<MemoryBudget>& budget) override { inner_->set_budget(budget); }
  std::uint64_t received_bytes() const override { return inner_->received_bytes(); }
  std::uint64_t unread_bytes() const override { return inner_->unread_bytes(); }
  void set_silence_limit(Nanos limit) override { inner_->set_silence_limit(limit); }
  PeerCredentials peer_credentials(CredentialLookup& lookup) const override { return inner_->peer_credentials(lookup); }
  std::string source() const override { return inner_->source(); }
  bool is_certified_for(std::string_view name) const override { return inner_->is_certified_for(name); }
  std::string describe() const override { return inner_->describe(); }

  Resumable* resumable() override { return inner_->resumable() ? this : nullptr; }
  void keep() override { inner_->resumable()->keep(); }
  bool may_resume() const override { return inner_->resumable()->may_resume(); }
  std::uint64_t suspend() override { return inner_->resumable()->suspend(); }
  bool resume(Link& connection, std::uint64_t received) override;
  void release(std::uint64_t call, Released& released) override { inner_->resumable()->release(call, released); }
  bool has_unverified() const override { return inner_->resumable()->has_unverified(); }
  void verify() override { inner_->resumable()->verify(); }
  bool give_up_verifying() override { return inner_->resumable()->give_up_verifying(); }
  Waiting waiting() const override { return inner_->resumable()->waiting(); }

 private:
  /// A message that is being sent by `send` or `send_between`.
  struct Place {
    bool judged = false;    // by the rules; the link may have begun it
    std::string corrupted;  // the payload that is sent instead of that of the message
  };

  SendState send(Outgoing& message, Place& place);
  bool is_held() const;
  void hold(Nanos until);
  void cut(const std::string& why);
  /// Returns whether the link outlives its connection.
  bool continues() const { return inner_->resumable() && inner_->resumable()->may_resume(); }
  SendState ended(SendState state) const;
  std::optional<SendState> corrupt(Outgoing& message, bool body, Place& place);
  bool write_at_once(const void* bytes, std::size_t size);
  bool corrupt_payload(Outgoing& message, std::string& corrupted);
  void keep_back(const Outgoing& message);
  SendState send_kept_back();

  const std::unique_ptr<Link> inner_;
  const FaultsPtr faults_;
  UniqueFd timer_;
  std::atomic<Nanos> held_until_ = 0;

  mutable std::mutex mutex_;
  std::string peer_name_;  // of the worker at the other end; "" before it is known
  LinkError cut_error_;

  // Sending thread only.
  Place front_, between_;
  std::unique_ptr<Outgoing> kept_back_;  // to be sent after the next message
};

}  // namespace telegrad

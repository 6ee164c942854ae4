#include "transports/tcp/resumable_link.h"

#include <new>
#include <utility>

#include "core/delivery_order.h"

namespace telegrad {
namespace {

constexpr std::uint64_t kNone = UINT64_MAX;

}  // namespace

// In a forked child, which lacks the thread that may have held `mutex_`. The fork has held the engine's mutex, under
// which alone `link_` is replaced.
std::vector<int> ResumableLink::descriptors() const { return continues_ ? std::vector<int>() : link_->descriptors(); }

void ResumableLink::set_limits(const Limits& limits) {
  limits_ = limits;
  link_->set_limits(limits);
}

void ResumableLink::close() {
  closed_ = true;
  current()->close();
}

void ResumableLink::fail(LinkError why) {
  std::lock_guard lock(mutex_);
  if (error_.text.empty()) error_ = std::move(why);
  violated_ = true;
}

LinkError ResumableLink::error() const {
  std::lock_guard lock(mutex_);
  return error_.text.empty() ? link_->error() : error_;
}

std::uint64_t ResumableLink::received_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_before_ + link_->received_bytes();
}

bool ResumableLink::add_lane(std::shared_ptr<Link> lane) {
  auto* other = dynamic_cast<ResumableLink*>(lane.get());
  return other && !suspended_ && link_->add_lane(other->link_);
}

// ---- sending

SendState ResumableLink::send(Outgoing& m) {
  if (!keeps_ || is_handshake(m.header.type)) return link_->send(m);
  return send(m, front_);
}

SendState ResumableLink::send_between(Outgoing& m) { return keeps_ ? send(m, between_) : link_->send_between(m); }

/// A message that has begun is completed, and others wait for room, as in `begin`.
bool ResumableLink::takes_between() {
  if (!keeps_ || between_.begun || between_.sent) return true;
  std::lock_guard lock(kept_mutex_);
  waits_for_room_ = !incomplete_ && !unacknowledged_.has_room();
  return !waits_for_room_;
}

SendState ResumableLink::send(Outgoing& m, Place& place) {
  if (closed_) return SendState::kBroken;
  if (std::exchange(place.sent, false)) return SendState::kSent;
  waits_for_link_ = false;
  if (suspended_) return SendState::kBlocked;
  SendState state = send_again();
  if (state == SendState::kSent) state = send_ack();
  if (state == SendState::kSent && large_again_ && !may_pass_large(m)) state = send_large_again();
  if (state == SendState::kSent && !place.begun && !begin(m, place)) return SendState::kBlocked;
  if (state == SendState::kSent) state = transmit(m, place);
  if (state == SendState::kSent) {
    end(m, place);
    return state;
  }
  waits_for_link_ = state == SendState::kBlocked && !waits_for_check_;
  return closed_ ? SendState::kBroken : SendState::kBlocked;  // `receive` reports that the connection has broken
}

/// Gives a message its number. Returns false if it has to wait, because too much has not been acknowledged.
bool ResumableLink::begin(const Outgoing& m, Place& place) {
  std::lock_guard lock(kept_mutex_);
  waits_for_room_ = !incomplete_ && !unacknowledged_.has_room();
  if (waits_for_room_) return false;
  try {
    if (!incomplete_) place.number = unacknowledged_.begin_next();
  } catch (const std::bad_alloc&) {
    incomplete_ = true;
  }
  place.begun = true;
  place.large = link_->is_large(m);
  return true;
}

/// Sends a message on the present connection, or the rest of it.
SendState ResumableLink::transmit(Outgoing& m, Place& place) {
  place.message = &m;
  const bool arrived = has_arrived(place);
  if (std::exchange(place.rewinds, false) && !arrived) rewind(m, now());
  if (arrived) return SendState::kSent;
  return &place == &between_ || large_again_ ? link_->send_between(m) : link_->send(m);
}

/// Keeps a message that has been sent.
void ResumableLink::end(Outgoing& m, Place& place) {
  place.begun = false;
  std::lock_guard lock(kept_mutex_);
  if (incomplete_) return;
  try {
    unacknowledged_.keep(place.number, m);
  } catch (const std::bad_alloc&) {
    incomplete_ = true;
  }
}

bool ResumableLink::buffer(const Outgoing& m) {
  if (!keeps_) return link_->buffer(m);
  if (suspended_ || front_.begun || between_.begun || again_ != kNone || large_again_ || ack_) return false;
  {
    std::lock_guard lock(kept_mutex_);
    if (incomplete_ || !unacknowledged_.has_room()) return false;
  }
  if (!link_->buffer(m)) return false;
  Place place;
  begin(m, place);
  end(const_cast<Outgoing&>(m), place);  // small, so it is copied
  return true;
}

SendState ResumableLink::flush() {
  if (!keeps_) return link_->flush();
  if (closed_) return SendState::kBroken;  // the messages that were begun have been destroyed
  if (suspended_) return SendState::kSent;
  waits_for_link_ = true;
  SendState state = send_again();
  if (waits_for_check_) state = SendState::kSent;  // between two messages
  if (state == SendState::kSent) state = send_ack();
  if (state == SendState::kSent) state = link_->flush();
  const bool in_message = (front_.is_under_way() && !front_.large) || between_.is_under_way();
  if (state == SendState::kSent && !in_message && send_large_again() == SendState::kBroken) state = SendState::kBroken;
  return state;
}

/// Sends the messages that have not arrived over an earlier connection, in the order of their numbers. Returns kSent if
/// all have begun. A large one may still be under way.
SendState ResumableLink::send_again() {
  waits_for_check_ = false;
  SendState state = ack_ ? send_ack() : SendState::kSent;  // a part of it may have been sent
  while (again_ != kNone && state == SendState::kSent) state = send_next_again();
  return state;
}

/// Sends message `again_` and continues with the next one. Returns kSent if it has been sent, or is large and has
/// begun.
SendState ResumableLink::send_next_again() {
  const bool is_front = front_.begun && again_ == front_.number;
  if (is_front && front_.large) {
    SendState state = send_large_again();
    if (state != SendState::kSent) return state;
    state = transmit(*front_.message, front_);
    if (state == SendState::kBroken) return state;
    if (state == SendState::kSent) {
      end(*front_.message, front_);
      front_.sent = true;
    }
    ++again_;
    return SendState::kSent;
  }
  if (!message_again_) {
    std::lock_guard lock(kept_mutex_);
    const bool is_between = between_.begun && again_ == between_.number;
    if (is_front || is_between || again_ >= unacknowledged_.end()) {  // what has begun is sent by its own call
      again_ = kNone;
      return SendState::kSent;
    }
    waits_for_check_ = unacknowledged_.is_unverified(again_);
    if (waits_for_check_) return SendState::kBlocked;
    try {
      message_again_ = unacknowledged_.again(again_, now(), released_);
    } catch (const std::bad_alloc&) {
      incomplete_ = true;
      link_->close();
      return SendState::kBlocked;
    }
  }
  SendState state = SendState::kSent;
  if (large_again_ && !may_pass_large(*message_again_)) state = send_large_again();
  if (state != SendState::kSent) return state;
  if (link_->is_large(*message_again_) && !front_.is_under_way()) {
    large_again_ = std::move(message_again_);
    state = send_large_again();
    if (state == SendState::kBlocked) state = SendState::kSent;
  } else {
    const bool between = large_again_ || front_.is_under_way();
    state = between ? link_->send_between(*message_again_) : link_->send(*message_again_);
  }
  if (state != SendState::kSent) return state;
  message_again_.reset();
  ++again_;
  return state;
}

/// Sends a part of the large message that is sent again. Returns kSent if none is left.
SendState ResumableLink::send_large_again() {
  if (!large_again_) return SendState::kSent;
  const SendState state = link_->send(*large_again_);
  if (state == SendState::kSent) large_again_.reset();
  return state;
}

bool ResumableLink::may_pass_large(const Outgoing& m) const {
  DeliveryOrder before;
  before.add(large_again_->header);
  return !link_->is_large(m) && before.may_overtake(m.header);
}

/// Sends a due acknowledgement, unless another message has begun that is not large. Returns kSent if a message may
/// follow.
SendState ResumableLink::send_ack() {
  if ((front_.begun && !front_.large) || between_.begun) return SendState::kSent;
  if (!ack_) {
    if (!ack_due_.load(std::memory_order_acquire)) return SendState::kSent;
    Outgoing ack;
    ack.header.type = FrameType::kAck;
    {
      std::lock_guard lock(kept_mutex_);
      ack_due_.store(false, std::memory_order_relaxed);
      ack.header.call_id = arrived_now_.count;
      ack.header.timeout = static_cast<std::int64_t>(arrived_now_.end);
    }
    if (!front_.begun && !large_again_ && link_->buffer(ack)) return SendState::kSent;
    ack_.emplace(std::move(ack));
  }
  const SendState state = front_.begun || large_again_ ? link_->send_between(*ack_) : link_->send(*ack_);
  if (state == SendState::kSent) ack_.reset();
  return state;
}

// ---- receiving

/// Takes what arrives on the present connection.
class ResumableLink::NumberedInbox final : public Inbox {
 public:
  NumberedInbox(ResumableLink& link, Inbox& inbox) : link_(link), inbox_(inbox) {}
  BlockPtr allocate(std::size_t size) override { return inbox_.allocate(size); }
  BlockPtr adopt(BlockPtr leased) override { return inbox_.adopt(std::move(leased)); }
  void deliver(Incoming&& m) override {
    if (link_.continues_) {  // the connection has passed to another link while it was read
      link_.continues_->arrived_.push_back(std::move(m));
    } else {
      link_.take(std::move(m), inbox_);
    }
  }

 private:
  ResumableLink& link_;
  Inbox& inbox_;
};

void ResumableLink::take(Incoming&& m, Inbox& inbox) {
  const FrameType type = m.header.type;
  if (!keeps_ || is_handshake(type)) return inbox.deliver(std::move(m));
  if (type == FrameType::kAck)
    return on_ack({.count = m.header.call_id, .end = static_cast<std::uint64_t>(m.header.timeout)});
  if (suspended_ || !received_.add(base_ + m.number, m.payload_size())) return;
  if (received_.is_ack_due()) [[unlikely]] {
    std::lock_guard lock(kept_mutex_);
    arrived_now_ = received_.acknowledge();
    ack_due_.store(true, std::memory_order_release);
  }
  inbox.deliver(std::move(m));
}

void ResumableLink::on_ack(const Acknowledgement& arrived) {
  std::lock_guard lock(kept_mutex_);
  if (!incomplete_ && !unacknowledged_.acknowledge(arrived, released_))
    fail("it acknowledged messages that were never sent");
}

ReceiveState ResumableLink::receive(Inbox& inbox, std::size_t budget) {
  if (continues_ || suspended_) return ReceiveState::kIdle;
  if (!arrived_.empty()) {
    for (Incoming& m : std::exchange(arrived_, {})) take(std::move(m), inbox);
  }
  retired_.clear();
  NumberedInbox numbered(*this, inbox);
  const std::shared_ptr<Link> link = link_;  // may be replaced meanwhile
  const ReceiveState state = link->receive(numbered, budget);
  if (!keeps_) return state;
  if (violated_) return ReceiveState::kBroken;
  Released released;
  std::lock_guard lock(kept_mutex_);
  released.swap(released_);
  if (suspended_) return ReceiveState::kIdle;
  if (state == ReceiveState::kBroken) return state;
  if (ack_due_.load(std::memory_order_relaxed)) return ReceiveState::kToSend;
  if (waits_for_room_ && unacknowledged_.has_room()) {
    waits_for_room_ = false;
    return ReceiveState::kToSend;
  }
  return state;
}

// ---- resuming

void ResumableLink::release(std::uint64_t call, Released& released) {
  std::lock_guard lock(kept_mutex_);
  if (incomplete_) return;
  try {
    unacknowledged_.release(call, released);
  } catch (const std::bad_alloc&) {
    incomplete_ = true;
  }
}

bool ResumableLink::has_unverified() const {
  std::lock_guard lock(kept_mutex_);
  return unacknowledged_.has_unverified();
}

void ResumableLink::verify() {
  while (true) {
    Released released;
    std::optional<Unacknowledged::Unverified> next;
    {
      std::lock_guard lock(kept_mutex_);
      if (!closed_) next = unacknowledged_.take_unverified();
    }
    if (!next) return;
    auto copy = copy_of(*next->message);
    {
      std::lock_guard lock(kept_mutex_);
      if (!unacknowledged_.begin_check(*next)) continue;
    }
    if (copy && !next->message->owner->is_unchanged()) copy.reset();  // asked last: the copy is what was sent
    std::lock_guard lock(kept_mutex_);
    try {
      unacknowledged_.end_check(*next, std::move(copy), released);
    } catch (const std::bad_alloc&) {
      incomplete_ = true;
    }
  }
}

bool ResumableLink::give_up_verifying() {
  Released released;
  std::lock_guard lock(kept_mutex_);
  try {
    return unacknowledged_.give_up_verifying(released);
  } catch (const std::bad_alloc&) {
    incomplete_ = true;
    return false;
  }
}

bool ResumableLink::may_resume() const {
  std::lock_guard lock(kept_mutex_);
  return keeps_ && !violated_ && !incomplete_ && !current()->violated();
}

Resumable::Waiting ResumableLink::waiting() const {
  std::lock_guard lock(kept_mutex_);
  return {.first = unacknowledged_.begin(),
          .any = unacknowledged_.begin() < unacknowledged_.end(),
          .bytes = unacknowledged_.bytes()};
}

std::uint64_t ResumableLink::suspend() {
  suspended_ = true;
  link_->close();
  arrived_.clear();
  message_again_.reset();
  large_again_.reset();
  ack_.reset();
  for (Place* place : {&front_, &between_}) place->rewinds = place->begun;
  base_ = received_.count();
  std::lock_guard lock(kept_mutex_);
  unacknowledged_.begin_verifying();
  return base_;
}

bool ResumableLink::resume(Link& connection, std::uint64_t received) {
  auto* other = dynamic_cast<ResumableLink*>(&connection);
  if (!other || closed_ || !suspended_) return false;
  {
    std::lock_guard lock(kept_mutex_);
    if (received < unacknowledged_.begin() || !unacknowledged_.acknowledge({.count = received}, released_))
      return false;
  }
  again_ = resumed_at_ = received;
  {
    std::lock_guard lock(kept_mutex_);
    arrived_now_ = received_.acknowledge();
    ack_due_ = arrived_now_.end != 0;  // the handshake has stated the count
  }
  other->continues_ = this;
  other->link_->set_limits(limits_);
  std::lock_guard lock(mutex_);
  bytes_before_ += link_->received_bytes();
  retired_.push_back(std::exchange(link_, other->link_));
  suspended_ = false;
  return true;
}

}  // namespace telegrad

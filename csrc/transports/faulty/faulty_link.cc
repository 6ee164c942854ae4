#include "transports/faulty/faulty_link.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/wakeup_fd.h"
#include "transports/frames.h"

namespace telegrad {
namespace {

constexpr Nanos kReorderLimit = 10 * kMillisecond;  // how long a message waits for one to be sent before it
constexpr std::size_t kBadRecord = 64;              // bytes in a TLS record that is no record of the connection

/// A copy of a message without segments.
struct Copy final : KeepAlive {
  std::string name, body;
};

std::unique_ptr<Outgoing> copy_of(const Outgoing& m) {
  auto owner = std::make_unique<Copy>();
  owner->name = m.name;
  owner->body = m.body;
  auto copy = std::make_unique<Outgoing>();
  copy->header = m.header;
  copy->name = owner->name;
  copy->body = owner->body;
  copy->immutable = true;
  copy->owner = std::move(owner);
  return copy;
}

}  // namespace

FaultyLink::FaultyLink(std::unique_ptr<Link> inner, FaultsPtr faults)
    : inner_(std::move(inner)),
      faults_(std::move(faults)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!timer_) cut("no descriptor for the timer of a link with fault rules: " + std::generic_category().message(errno));
  faults_->add_link(this);
}

FaultyLink::~FaultyLink() { faults_->remove_link(this); }

void FaultyLink::set_peer_name(std::string_view name) {
  std::lock_guard lock(mutex_);
  peer_name_ = name;
}

std::vector<int> FaultyLink::descriptors() const {
  std::vector<int> all = inner_->descriptors();
  if (timer_) all.push_back(timer_.get());
  return all;
}

LinkError FaultyLink::error() const {
  std::lock_guard lock(mutex_);
  return cut_error_.text.empty() ? inner_->error() : cut_error_;
}

/// Ends the connection. The engine connects again, as after a reset, but the end that did not dial logs the reason too.
void FaultyLink::cut(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (cut_error_.text.empty()) cut_error_ = {LinkError::of_call(ECONNRESET).with_context(why).text, ECONNABORTED};
  }
  if (continues()) {  // it would not continue after `close`
    ::shutdown(inner_->fd(), SHUT_RDWR);
  } else {
    inner_->close();
  }
}

/// Returns the state of a message whose connection a rule has ended: `state`, but one that may be sent again waits.
SendState FaultyLink::ended(SendState state) const { return continues() ? SendState::kBlocked : state; }

bool FaultyLink::resume(Link& connection, std::uint64_t received) {
  {
    std::lock_guard lock(mutex_);
    cut_error_ = {};
  }
  held_until_.store(0, std::memory_order_release);
  return inner_->resumable()->resume(*dynamic_cast<FaultyLink&>(connection).inner_, received);
}

// ---- holding messages

bool FaultyLink::is_held() const {
  const Nanos until = held_until_.load(std::memory_order_acquire);
  return until != 0 && now() < until;
}

void FaultyLink::hold(Nanos until) {
  held_until_.store(until, std::memory_order_release);
  if (until != kNever) arm_timerfd(timer_.get(), until);
}

void FaultyLink::release() {
  if (held_until_.exchange(0, std::memory_order_acq_rel) != 0) arm_timerfd(timer_.get(), now());
}

/// The caller then calls `flush` and sends the blocked message.
void FaultyLink::poll_lanes() { drain_fd(timer_.get()); }

// ---- order

void FaultyLink::keep_back(const Outgoing& m) {
  kept_back_ = copy_of(m);
  arm_timerfd(timer_.get(), now() + kReorderLimit);
}

/// Sends the message that was kept back, if there is one. After kBlocked, call again.
SendState FaultyLink::send_kept_back() {
  if (!kept_back_) return SendState::kSent;
  const SendState state = inner_->send(*kept_back_);
  if (state == SendState::kSent) kept_back_.reset();
  return state;
}

SendState FaultyLink::flush() {
  const SendState state = inner_->flush();
  // Not between two parts of another message.
  return state == SendState::kSent && !front_.judged && !between_.judged ? send_kept_back() : state;
}

// ---- corruption

/// Writes to the socket itself. Returns false if not all bytes could be written.
bool FaultyLink::write_at_once(const void* bytes, std::size_t size) {
  return ::send(inner_->fd(), bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(size);
}

/// Sends the payload with one bit flipped. Returns false if the message has none.
bool FaultyLink::corrupt_payload(Outgoing& m, std::string& corrupted) {
  OutSegment* segment = nullptr;
  for (OutSegment& s : m.segments) {
    if (s.size > 0 && !segment) segment = &s;
  }
  if (!m.body.empty()) {
    corrupted = m.body;
  } else if (segment) {
    corrupted.assign(reinterpret_cast<const char*>(segment->data), segment->size);
  } else {
    return false;
  }
  const std::uint64_t bit = faults_->random() % (corrupted.size() * 8);
  corrupted[bit / 8] = static_cast<char>(corrupted[bit / 8] ^ (1 << bit % 8));
  if (!m.body.empty()) {
    m.body = corrupted;
  } else {
    segment->data = reinterpret_cast<const std::byte*>(corrupted.data());
  }
  return true;
}

/// Corrupts a message. Returns nothing if it is to be sent, with a corrupted payload.
std::optional<SendState> FaultyLink::corrupt(Outgoing& m, bool body, Place& place) {
  const std::string scheme = describe().substr(0, describe().find(':'));
  bool sent = false;
  if (scheme == "tls") {  // beneath the encryption, where every change is a record that fails its check
    unsigned char record[5 + kBadRecord] = {0x17, 3, 3, 0, kBadRecord};
    for (std::size_t i = 5; i < sizeof record; ++i) record[i] = static_cast<unsigned char>(faults_->random());
    sent = write_at_once(record, sizeof record);
  } else if (scheme == "tcp" || scheme == "unix") {
    if (body && corrupt_payload(m, place.corrupted)) return std::nullopt;
    FrameHeader header = m.header;
    fill_header(header, m);
    header.magic ^= 1u << faults_->random() % 32;
    sent = write_at_once(&header, sizeof header);
  }
  if (sent) {
    if (continues()) hold(kNever);  // until the other end breaks the connection
    return ended(SendState::kSent);
  }
  cut("a fault rule could not corrupt a message on " + describe());
  return ended(SendState::kBroken);
}

// ---- sending

SendState FaultyLink::send(Outgoing& m, Place& place) {
  const bool in_parts = &place == &between_ && front_.judged;  // `m` goes between the parts of another message
  if (!place.judged) {
    // A message that was begun must end first.
    if (kept_back_ && !in_parts && (kept_back_->sent > 0 || m.header.type == FrameType::kGoodbye)) {
      const SendState state = send_kept_back();
      if (state != SendState::kSent) return state;
    }
    std::string peer;
    {
      std::lock_guard lock(mutex_);
      if (!cut_error_.text.empty()) return ended(SendState::kBroken);
      peer = peer_name_;
    }
    if (const auto rule = faults_->judge(m.header, peer, *this)) {
      const std::string number = "fault rule " + std::to_string(rule->id);
      switch (rule->action) {
        case FaultAction::kDrop:
          cut(number + " has dropped a message");
          return ended(SendState::kSent);
        case FaultAction::kCut:
          cut(number + " has cut the connection");
          return ended(SendState::kBroken);
        case FaultAction::kDelay:
          hold(rule->delay == 0 ? kNever : now() + rule->delay);
          break;
        case FaultAction::kDuplicate:
          if (kept_back_ || in_parts) break;
          kept_back_ = copy_of(m);
          kept_back_->header.credit = 0;  // it counts once
          break;
        case FaultAction::kReorder:
          if (kept_back_ || in_parts || !m.segments.empty()) break;
          keep_back(m);
          return SendState::kSent;
        case FaultAction::kCorrupt: {
          if (const auto state = corrupt(m, rule->body, place)) return *state;
          break;
        }
      }
    }
    place.judged = true;
  }
  if (is_held()) return SendState::kBlocked;
  const SendState state = &place == &between_ ? inner_->send_between(m) : inner_->send(m);
  if (state != SendState::kSent) return state;
  place.judged = false;
  if (!in_parts && send_kept_back() == SendState::kBlocked) arm_timerfd(timer_.get(), now() + kMillisecond);
  return SendState::kSent;
}

std::unique_ptr<Link> add_faults(std::unique_ptr<Link> link, FaultsPtr faults) {
  return std::make_unique<FaultyLink>(std::move(link), std::move(faults));
}

}  // namespace telegrad

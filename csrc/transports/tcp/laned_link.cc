#include "transports/tcp/laned_link.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace telegrad {
namespace {

constexpr std::uint64_t kMinBytesForLanes = 32 << 20;  // bytes of large messages before lanes are requested
constexpr std::uint64_t kSendTurn = 512 << 10;         // bytes sent before other threads may send
constexpr std::size_t kLaneBudget = 1 << 20;           // bytes read from a lane before the next lane is read
constexpr Nanos kDrainTimeout = 10 * kSecond;          // limit for data on lanes after the end of the first connection
constexpr unsigned kTrials = 6;           // messages that are sent in turn with and without lanes at first,
constexpr unsigned kTrialInterval = 256;  // and the longest interval of single trials afterwards
constexpr double kWeight = 0.3;           // weight of the latest message in the average
constexpr double kMargin = 1.1;           // lanes must be faster by this factor

}  // namespace

bool LaneSpeeds::next_uses_lanes() {
  const unsigned n = messages_++;
  if (n < kTrials) return n % 2 != 0;
  // Networks change, and the first messages may have been slow for other reasons.
  const bool is_trial = std::has_single_bit(n) || n % kTrialInterval == 0;
  return (striped_ > kMargin * alone_) != is_trial;
}

void LaneSpeeds::record(bool used_lanes, std::uint64_t bytes, Nanos time) {
  double& rate = used_lanes ? striped_ : alone_;
  const double latest = static_cast<double>(bytes) / static_cast<double>(std::max<Nanos>(time, 1));
  rate = rate == 0 ? latest : rate + kWeight * (latest - rate);
}

LanedLink::LanedLink(std::unique_ptr<ByteStream> stream, std::string description, bool connecting,
                     const SocketKind& kind, Striping striping)
    : striping_(striping),
      first_(std::move(stream), std::move(description), connecting, kind),
      fragmenter_(striping.sizes.fragment) {
  first_.set_segment_source(&reassembler_);
}

LanedLink::~LanedLink() = default;

void LanedLink::set_limits(const Limits& limits) {
  limits_ = limits;
  first_.set_limits(limits);
  reassembler_.set_limits(limits);
}

void LanedLink::fail(LinkError why) {
  std::lock_guard lock(error_mutex_);
  if (!broken_) error_ = std::move(why);
  broken_ = true;
}

LinkError LanedLink::error() const {
  std::lock_guard lock(error_mutex_);
  return error_;
}

void LanedLink::close() {
  closed_ = true;
  first_.close();
  for (std::size_t i = 0, n = open_; i < n; ++i) lanes_[i].stream->close();
}

std::uint64_t LanedLink::received_bytes() const {
  std::uint64_t all = first_.received_bytes();
  for (std::size_t i = 0, n = open_; i < n; ++i) all += lanes_[i].stream->received_bytes();
  return all;
}

std::vector<int> LanedLink::descriptors() const {
  std::vector<int> all{fd()};
  if (epoll_) all.push_back(epoll_.get());
  for (std::size_t i = 0, n = open_; i < n; ++i) all.push_back(lanes_[i].stream->fd());
  return all;
}

// ---- opening lanes

bool LanedLink::wants_lanes() const {
  return striping_.lanes && open_ == 0 && large_bytes_.load(std::memory_order_relaxed) >= kMinBytesForLanes;
}

bool LanedLink::add_lane(std::shared_ptr<Link> lane) {
  auto* other = dynamic_cast<LanedLink*>(lane.get());
  const std::size_t n = open_;
  if (!striping_.lanes || !other || !other->striping_.lanes || other == this || n == kMaxLanes || lane_of_ ||
      other->open_ > 0 || closed_ || broken_ || ended_)
    return false;
  if (!epoll_) epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = n}};
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, other->fd(), &event) != 0) return false;
  other->lane_of_ = this;
  other->first_.set_silence_limit(0);  // this end may leave a lane unread while it waits for the first connection
  other->first_.set_limits(limits_);
  other->first_.set_segment_source(&lane_source_);
  lanes_[n].stream = &other->first_;
  lanes_[n].owner = std::move(lane);
  open_ = n + 1;
  if (closed_) lanes_[n].stream->close();
  lanes_due_ = true;
  return true;
}

/// Counts the tensor bytes of a sent or received message.
void LanedLink::count(std::uint64_t bytes) {
  if (bytes >= striping_.striped) large_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

/// Sets the events for which the epoll watches a lane.
void LanedLink::watch(std::size_t index, bool Lane::* what, bool on) {
  Lane& lane = lanes_[index];
  std::lock_guard lock(interest_mutex_);
  if (std::exchange(lane.*what, on) == on) return;
  const auto events = (lane.reads ? std::uint32_t{EPOLLIN} : 0u) | (lane.writes ? std::uint32_t{EPOLLOUT} : 0u);
  epoll_event event{.events = events, .data = {.u64 = index}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, lane.stream->fd(), &event);  // fails for a lane that has ended
}

// ---- sending

bool LanedLink::is_large(const Outgoing& m) const { return large_bytes(m, striping_.sizes) > 0; }

SendState LanedLink::send(Outgoing& m) {
  if (sends_no_more_) return SendState::kBroken;
  if (large_.message) return send_large(m);
  waits_for_first_ = true;
  if (m.segments.empty() || m.is_begun()) return first_.send(m);
  for (OutSegment& s : m.segments) s.lease = 0;  // a stream shares no memory
  const std::uint64_t size = large_bytes(m, striping_.sizes);
  if (size == 0) return first_.send(m);
  if (broken_ || closed_) return SendState::kBroken;
  count(size);
  const std::size_t n = lanes();
  const bool stripes = n > 0 && size >= striping_.striped && (!striping_.measured || speeds_.next_uses_lanes());
  large_ = {.message = &m, .start = now(), .unsent = unsent(), .bytes = size};
  large_.first = n > 0 && !stripes ? 1 : 0;
  large_.end = stripes ? n + 1 : large_.first + 1;
  m.fragmented = true;
  for (OutSegment& s : m.segments) s.lease = s.size >= striping_.sizes.segment ? kFragmented : 0;
  fragmenter_.begin();
  return send_large(m);
}

SendState LanedLink::send_large(Outgoing& m) {
  const SendState state = send_fragments(m);
  if (state == SendState::kBroken) return broken();
  if (state != SendState::kSent) return state;
  fragmenter_.end();
  large_.message = nullptr;
  // Only bytes that have left the socket buffers count, because the kernel accepts a lot at once.
  const std::uint64_t before = large_.bytes + large_.unsent, moved = before - std::min(before, unsent());
  const bool measured = large_.bytes >= striping_.striped && moved > large_.bytes / 2;
  if (measured) speeds_.record(large_.end > large_.first + 1, moved, now() - large_.start);
  return state;
}

/// Abandons the message that is being sent. No other may follow it, as the connections may not all have broken, and the
/// receiver would take it for the rest of this one.
SendState LanedLink::broken() {
  sends_no_more_ = true;
  first_.stop_sending();
  large_.message = nullptr;
  for (Fragment& fragment : fragments_) fragment.busy = false;
  return SendState::kBroken;
}

SendState LanedLink::flush() {
  if (sends_no_more_) return SendState::kBroken;
  waits_for_first_ = true;
  return first_.flush();
}

SendState LanedLink::send_between(Outgoing& m) {
  if (sends_no_more_) return SendState::kBroken;
  waits_for_first_ = true;
  if (large_.message) {
    SendState state = send_frame();
    if (state == SendState::kSent && fragments_[0].busy) state = send_fragment(0);
    if (state == SendState::kBroken) return broken();
    if (state != SendState::kSent) return state;
  }
  return first_.send(m);
}

/// Returns the bytes in the socket buffers that the kernel has not sent.
std::uint64_t LanedLink::unsent() {
  std::uint64_t all = 0;
  for (std::size_t i = 0, n = lanes() + 1; i < n; ++i) {
    int bytes = 0;
    if (ioctl(connection(i).fd(), SIOCOUTQ, &bytes) == 0) all += static_cast<std::uint64_t>(bytes);
  }
  return all;
}

/// Sends the frame of the large message, without its fragments.
SendState LanedLink::send_frame() {
  if (large_.framed) return SendState::kSent;
  waits_for_first_ = true;
  const SendState state = first_.send(*large_.message);
  large_.framed = state == SendState::kSent;
  return state;
}

/// Continues the fragment of a connection.
SendState LanedLink::send_fragment(std::size_t index) {
  Fragment& fragment = fragments_[index];
  fragment.locate(*large_.message);
  const SendState state = connection(index).send(fragment.out);
  fragment.busy = state != SendState::kSent;
  return state;
}

SendState LanedLink::send_fragments(Outgoing& m) {
  if (const SendState state = send_frame(); state != SendState::kSent) return state;
  std::array<bool, kMaxLanes + 1> blocked{};
  std::uint64_t sent = 0;
  bool left = true, moves = true;
  while (left && moves && sent < kSendTurn) {
    left = moves = false;
    for (std::size_t i = large_.first; i < large_.end; ++i) {
      Fragment& fragment = fragments_[i];
      if (blocked[i] || (!fragment.busy && !fragmenter_.cut(m, fragment))) {
        left = left || blocked[i];
        continue;
      }
      left = true;
      const std::uint64_t before = fragment.out.sent;
      const SendState state = send_fragment(i);
      if (state == SendState::kBroken) return state;
      sent += fragment.out.sent - before;
      blocked[i] = fragment.busy;
      moves = moves || !fragment.busy;
    }
  }
  m.sent += sent;  // waiting threads check this for progress
  const bool turn_over = left && moves;
  const bool first_takes = large_.first == 0 && !blocked[0];
  waits_for_first_ = blocked[0] || (turn_over && first_takes);
  for (std::size_t i = std::max<std::size_t>(large_.first, 1); i < large_.end; ++i) {
    watch(i - 1, &Lane::writes, left && (blocked[i] || (turn_over && !first_takes)));
  }
  return left ? SendState::kBlocked : SendState::kSent;
}

// ---- receiving

/// Inbox for the first connection and the lanes.
class LanedLink::LaneInbox final : public Inbox {
 public:
  LaneInbox(LanedLink& link, Inbox& inbox, bool of_lane) : link_(link), inbox_(inbox), of_lane_(of_lane) {}
  BlockPtr allocate(std::size_t size) override { return inbox_.allocate(size); }
  BlockPtr adopt(BlockPtr lent) override { return inbox_.adopt(std::move(lent)); }
  void deliver(Incoming&& m) override {
    LanedLink& link = link_.lane_of_ ? *link_.lane_of_ : link_;  // the link can become a lane while it is read
    Reassembler& reassembler = link.reassembler_;
    const bool may_deliver = &link == &link_;
    const bool is_fragment = m.header.type == FrameType::kFragment;
    const bool out_of_place = !is_fragment && (of_lane_ || !may_deliver);
    if (!is_fragment && !out_of_place) {
      if (!m.segments.empty()) link.count(m.payload_size());
      if (reassembler.passes(m)) return inbox_.deliver(std::move(m));
    }
    if (out_of_place || !reassembler.accept(std::move(m))) {
      link.violated_ = true;
      link.fail(kBadFragments);
    }
    if (may_deliver) reassembler.deliver(inbox_);
  }

 private:
  LanedLink& link_;
  Inbox& inbox_;
  const bool of_lane_;
};

ReceiveState LanedLink::receive(Inbox& inbox, std::size_t budget) {
  if (broken_) return ReceiveState::kBroken;
  reassembler_.deliver(inbox);
  bool more = false, to_send = false;
  if (!ended_) {
    LaneInbox lane_inbox(*this, inbox, false);
    const ReceiveState state = first_.receive(lane_inbox, budget);
    more = state == ReceiveState::kMore;
    to_send = state == ReceiveState::kToSend;
    if (state == ReceiveState::kBroken) {
      ended_ = true;
      drain_until_ = now() + kDrainTimeout;
      const LinkError why = first_.error();
      if (!why.text.empty()) fail(lane_error_.text.empty() ? why : lane_error_);
    }
  }
  if (open_ > 0 && (reassembler_.waits() || lanes_due_ || ended_)) more = read_lanes(inbox, budget) || more;
  return receive_state(more, to_send);
}

/// Reads a lane. Returns true if it has more data.
bool LanedLink::read_lanes(Inbox& inbox, std::size_t budget) {
  lanes_due_ = false;
  const std::size_t n = open_;
  for (std::size_t i = 0; i < n && !reassembler_.has_early(); ++i) {
    if (std::exchange(lanes_[i].paused, false)) watch(i, &Lane::reads, true);
  }
  epoll_event events[kMaxLanes];
  const int count = epoll_wait(epoll_.get(), events, static_cast<int>(kMaxLanes), 0);
  bool more = false;
  for (int e = 0; e < count && !broken_; ++e) {
    const std::size_t i = events[e].data.u64;
    Lane& lane = lanes_[i];
    if (lane.ended || lane.paused || (events[e].events & ~static_cast<std::uint32_t>(EPOLLOUT)) == 0) continue;
    LaneInbox lane_inbox(*this, inbox, true);
    const ReceiveState state = lane.stream->receive(lane_inbox, std::min(budget, kLaneBudget));
    more = more || state == ReceiveState::kMore;
    if (state == ReceiveState::kBroken) {
      lane_ended(i, lane.stream->error());
    } else if (reassembler_.has_early()) {
      lane.paused = true;
      watch(i, &Lane::reads, false);
    }
  }
  return more;
}

/// Ends the link after a lane has ended, but only after the data on the first connection has been read. If the other
/// end is alive, it closes the first connection when it sees that this end has closed it.
void LanedLink::lane_ended(std::size_t index, const LinkError& why) {
  lanes_[index].ended = true;
  if (lanes_[index].stream->violated()) violated_ = true;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, lanes_[index].stream->fd(), nullptr);
  pollfd first{.fd = fd(), .events = POLLRDHUP, .revents = 0};
  const bool alone = !closed_ && !ended_ && ::poll(&first, 1, 0) == 0;
  if (lane_error_.text.empty() && !why.text.empty()) lane_error_ = why.with_context("a lane broke");
  if (lane_error_.text.empty() && alone) lane_error_ = "a lane was closed";
  first_.stop_sending();
}

ReceiveState LanedLink::receive_state(bool more, bool to_send) {
  if (ended_ && !broken_) {
    const std::size_t n = open_;
    const bool lanes_ended = std::all_of(lanes_.begin(), lanes_.begin() + static_cast<std::ptrdiff_t>(n),
                                         [](const Lane& lane) { return lane.ended; });
    if (!reassembler_.waits() || lanes_ended || !lane_error_.text.empty() || now() >= drain_until_) {
      fail(!lane_error_.text.empty() ? lane_error_ : reassembler_.waits() ? kEndedInMessage : "");
    }
  }
  if (broken_) return ReceiveState::kBroken;
  if (to_send) return ReceiveState::kToSend;
  return more ? ReceiveState::kMore : ReceiveState::kIdle;
}

}  // namespace telegrad

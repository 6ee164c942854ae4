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
constexpr std::uint64_t kSendTurn = 4 << 20;           // bytes sent before other threads may send
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
    : striping_(striping), first_(std::move(stream), std::move(description), connecting, kind) {
  first_.set_segment_source(&reassembler_);
}

LanedLink::~LanedLink() = default;

void LanedLink::set_limits(const Limits& limits) {
  limits_ = limits;
  first_.set_limits(limits);
  reassembler_.set_limits(limits);
}

void LanedLink::fail(std::string why) {
  std::lock_guard lock(error_mutex_);
  if (!broken_) error_ = std::move(why);
  broken_ = true;
}

std::string LanedLink::error() const {
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
  return open_ == 0 && large_bytes_.load(std::memory_order_relaxed) >= kMinBytesForLanes;
}

bool LanedLink::add_lane(std::shared_ptr<Link> lane) {
  auto* other = dynamic_cast<LanedLink*>(lane.get());
  const std::size_t n = open_;
  if (!other || other == this || n == kMaxLanes || lane_of_ || other->open_ > 0 || closed_ || broken_ || ended_)
    return false;
  if (!epoll_) epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = n}};
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, other->fd(), &event) != 0) return false;
  other->lane_of_ = this;
  other->first_.set_silence_limit(0);  // this end may leave a lane unread while it waits for the first connection
  other->first_.set_limits(limits_);
  other->first_.set_segment_source(&reassembler_);
  lanes_[n].stream = &other->first_;
  lanes_[n].owner = std::move(lane);
  open_ = n + 1;
  if (closed_) lanes_[n].stream->close();
  lanes_due_ = true;
  return true;
}

/// Counts the tensor bytes of a sent or received message.
void LanedLink::count(std::uint64_t bytes) {
  if (bytes >= striping_.message) large_bytes_.fetch_add(bytes, std::memory_order_relaxed);
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

SendState LanedLink::send(Outgoing& m) {
  if (large_.active) return send_large(m);
  if (m.segments.empty() || !m.prefix.empty() || m.sent > 0) return first_.send(m);
  waits_for_first_ = true;
  std::uint64_t size = 0;
  for (OutSegment& s : m.segments) {
    s.lease = 0;  // TCP shares no memory
    if (s.size >= striping_.segment) size += s.size;
  }
  if (size < striping_.message) return first_.send(m);
  if (broken_ || closed_) return SendState::kBroken;
  count(size);
  const bool uses_lanes = lanes() > 0 && (!striping_.measured || speeds_.next_uses_lanes());
  large_ = {.active = true, .connections = uses_lanes ? lanes() + 1 : 1};
  large_.start = now();
  large_.unsent = unsent();
  large_.bytes = size;
  m.fragmented = uses_lanes;
  for (OutSegment& s : m.segments) s.lease = (uses_lanes && s.size >= striping_.segment) ? kFragmented : 0;
  return send_large(m);
}

SendState LanedLink::send_large(Outgoing& m) {
  const bool uses_lanes = large_.connections > 1;
  const SendState state = uses_lanes ? send_fragments(m) : first_.send(m);
  if (state != SendState::kSent) return state;
  large_.active = false;
  // Only bytes that have left the socket buffers count, because the kernel accepts a lot at once.
  const std::uint64_t before = large_.bytes + large_.unsent, moved = before - std::min(before, unsent());
  if (moved > large_.bytes / 2) speeds_.record(uses_lanes, moved, now() - large_.start);
  return state;
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

/// Returns the next fragment of the message, if any is left.
bool LanedLink::cut(Outgoing& m, Fragment& fragment) {
  while (large_.segment < m.segments.size()) {
    const OutSegment& s = m.segments[large_.segment];
    if (s.lease == 0 || large_.offset == s.size) {
      ++large_.segment;
      large_.offset = 0;
      continue;
    }
    const std::uint64_t size = std::min(s.size - large_.offset, striping_.fragment);
    fragment.out = Outgoing();
    fragment.out.header.type = FrameType::kFragment;
    fragment.out.header.call_id = next_out_;
    fragment.out.header.timeout = static_cast<std::int64_t>(large_.place);
    fragment.out.segments.push_back({s.data, size});
    fragment.segment = large_.segment;
    fragment.offset = large_.offset;
    fragment.busy = true;
    large_.offset += size;
    large_.place += size;
    return true;
  }
  return false;
}

SendState LanedLink::send_fragments(Outgoing& m) {
  if (!large_.framed) {
    waits_for_first_ = true;
    const SendState state = first_.send(m);
    if (state != SendState::kSent) return state;
    large_.framed = true;
  }
  std::array<bool, kMaxLanes + 1> blocked{};
  std::uint64_t sent = 0;
  bool left = true, moves = true;
  while (left && moves && sent < kSendTurn) {
    left = moves = false;
    for (std::size_t i = 0; i < large_.connections; ++i) {
      Fragment& fragment = fragments_[i];
      if (blocked[i] || (!fragment.busy && !cut(m, fragment))) {
        left = left || blocked[i];
        continue;
      }
      left = true;
      fragment.out.segments[0].data =
          m.segments[fragment.segment].data + fragment.offset;  // it may have been copied meanwhile
      const std::uint64_t before = fragment.out.sent;
      const SendState state = connection(i).send(fragment.out);
      if (state == SendState::kBroken) return state;
      sent += fragment.out.sent - before;
      fragment.busy = state != SendState::kSent;
      blocked[i] = fragment.busy;
      moves = moves || !fragment.busy;
    }
  }
  m.sent += sent;  // waiting threads check this for progress
  waits_for_first_ = blocked[0] || (left && moves);
  for (std::size_t i = 1; i < large_.connections; ++i) watch(i - 1, &Lane::writes, left && blocked[i]);
  if (left) {
    if (!blocked[0] || !moves) return SendState::kBlocked;
    for (std::size_t i = 1; i < large_.connections; ++i) watch(i - 1, &Lane::writes, true);
    return SendState::kBlocked;
  }
  ++next_out_;
  return SendState::kSent;
}

// ---- receiving

/// Inbox for the first connection and the lanes.
class LanedLink::LaneInbox final : public Inbox {
 public:
  LaneInbox(LanedLink& link, Inbox& inbox) : link_(link), inbox_(inbox) {}
  BlockPtr allocate(std::size_t size) override { return inbox_.allocate(size); }
  BlockPtr adopt(BlockPtr lent) override { return inbox_.adopt(std::move(lent)); }
  void deliver(Incoming&& m) override {
    LanedLink& link = link_.lane_of_ ? *link_.lane_of_ : link_;  // the link can become a lane while it is read
    Reassembler& reassembler = link.reassembler_;
    if (m.header.type != FrameType::kFragment) {
      if (!m.segments.empty()) link.count(m.payload_size());
      if (!reassembler.begun() && !reassembler.waits()) return inbox_.deliver(std::move(m));
    }
    if (!reassembler.accept(std::move(m))) link.fail("received fragments of a message that do not fit together");
    if (&link == &link_) reassembler.deliver(inbox_);
  }

 private:
  LanedLink& link_;
  Inbox& inbox_;
};

ReceiveState LanedLink::receive(Inbox& inbox, std::size_t budget) {
  if (broken_) return ReceiveState::kBroken;
  reassembler_.deliver(inbox);
  bool more = false, to_send = false;
  if (!ended_) {
    LaneInbox lane_inbox(*this, inbox);
    const ReceiveState state = first_.receive(lane_inbox, budget);
    more = state == ReceiveState::kMore;
    to_send = state == ReceiveState::kToSend;
    if (state == ReceiveState::kBroken) {
      ended_ = true;
      drain_until_ = now() + kDrainTimeout;
      const std::string why = first_.error();
      if (!why.empty()) fail(lane_error_.empty() ? why : lane_error_);
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
    LaneInbox lane_inbox(*this, inbox);
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
void LanedLink::lane_ended(std::size_t index, const std::string& why) {
  lanes_[index].ended = true;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, lanes_[index].stream->fd(), nullptr);
  pollfd first{.fd = fd(), .events = POLLRDHUP, .revents = 0};
  const bool alone = !closed_ && !ended_ && ::poll(&first, 1, 0) == 0;
  if (lane_error_.empty() && !why.empty()) lane_error_ = "a lane broke: " + why;
  if (lane_error_.empty() && alone) lane_error_ = "a lane was closed";
  first_.stop_sending();
}

ReceiveState LanedLink::receive_state(bool more, bool to_send) {
  if (ended_ && !broken_) {
    const std::size_t n = open_;
    const bool lanes_ended = std::all_of(lanes_.begin(), lanes_.begin() + static_cast<std::ptrdiff_t>(n),
                                         [](const Lane& lane) { return lane.ended; });
    if (!reassembler_.waits() || lanes_ended || !lane_error_.empty() || now() >= drain_until_) {
      fail(!lane_error_.empty()   ? lane_error_
           : reassembler_.waits() ? "the connection ended in the middle of a message"
                                  : "");
    }
  }
  if (broken_) return ReceiveState::kBroken;
  if (to_send) return ReceiveState::kToSend;
  return more ? ReceiveState::kMore : ReceiveState::kIdle;
}

}  // namespace telegrad

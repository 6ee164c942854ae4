// A TCP link with optional lanes: further connections to the same end, over which large messages are striped.
//
// The first connection carries all frames, in order. The large segments of a fragmented message are not in its frame.
// Their headers have the lease kFragmented, and their bytes follow as fragments, frames of type kFragment, over all
// lanes including the first connection. The next connection that is writable gets the next fragment, so a slow lane
// does not delay the others. One message is fragmented at a time. Both ends count these messages, which gives their
// numbers:
//     FrameHeader   type kFragment, call_id: number of the message, timeout: offset of its bytes in the fragmented
//                   segments, concatenated
//     SegmentHeader the size, lease 0
// A fragment is read directly into its place. One that arrives before the frame of its message is buffered and copied,
// and its lane is not read meanwhile. Messages are delivered in the order of their frames.
//
// Each end sends its messages over all lanes or over the first connection only, whichever was faster (LaneSpeeds).
// There is one more descriptor, `lanes_fd`, an epoll of the lanes, so that the leader need not know each lane.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transports/stream/stream_link.h"
#include "transports/tcp/reassembler.h"

namespace telegrad {

/// Parameters of striping.
struct Striping {
  std::uint64_t message = 4 << 20;     // least size of a message that is striped
  std::uint64_t segment = 256 << 10;   // least size of a segment that is striped
  std::uint64_t fragment = 512 << 10;  // size of a fragment
  bool measured = true;                // use all lanes only while that is faster; else always
};

/// Measured rates over all lanes and over the first connection only. Lanes help if each connection is limited on its
/// own: by a traffic shaper, a congestion window on a long path, or a processor per connection. Otherwise they cost
/// processor time.
class LaneSpeeds {
 public:
  /// Returns whether the next large message uses all lanes.
  bool next_uses_lanes();
  void record(bool used_lanes, std::uint64_t bytes, Nanos time);

 private:
  unsigned messages_ = 0;
  double alone_ = 0, striped_ = 0;  // bytes per nanosecond, moving averages
};

class LanedLink final : public Link {
 public:
  LanedLink(std::unique_ptr<ByteStream> stream, std::string description, bool connecting, const SocketKind& kind,
            Striping striping = {});
  ~LanedLink() override;

  int fd() const override { return first_.fd(); }
  SendState send(Outgoing& message) override;
  bool buffer(const Outgoing& message) override { return first_.buffer(message); }
  SendState flush() override { return first_.flush(); }
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  bool wants_lanes() const override;
  bool add_lane(std::shared_ptr<Link> lane) override;
  std::size_t lanes() const override { return open_.load(std::memory_order_acquire); }
  int lanes_fd() const override { return epoll_.get(); }
  void poll_lanes() override { lanes_due_ = true; }
  bool waits_for_fd() const override { return waits_for_first_ && first_.waits_for_fd(); }
  std::vector<int> descriptors() const override;
  void set_limits(const Limits& limits) override;
  void close() override;
  std::string error() const override;
  PeerCredentials peer_credentials(CredentialLookup& lookup) const override { return first_.peer_credentials(lookup); }
  std::uint64_t received_bytes() const override;
  void set_silence_limit(Nanos limit) override { first_.set_silence_limit(limit); }
  std::string source() const override { return first_.source(); }
  std::string describe() const override { return first_.describe(); }
  bool is_certified_for(std::string_view name) const override { return first_.is_certified_for(name); }

 private:
  static constexpr std::size_t kMaxLanes = 15;  // lanes in addition to the first connection

  struct Lane {
    std::shared_ptr<Link> owner;  // owns `stream`
    StreamLink* stream = nullptr;
    bool ended = false;                 // receiving thread only
    bool paused = false;                // not read for now; receiving thread only
    bool reads = true, writes = false;  // events of the epoll; under interest_mutex_
  };
  struct Fragment {  // a fragment that is being sent over one connection
    Outgoing out;
    bool busy = false;
    std::size_t segment = 0;   // index in the message
    std::uint64_t offset = 0;  // in that segment
  };
  class LaneInbox;

  void count(std::uint64_t bytes);
  void watch(std::size_t lane, bool Lane::* what, bool on);
  SendState send_large(Outgoing& message);
  SendState send_fragments(Outgoing& message);
  bool cut(Outgoing& message, Fragment& fragment);
  std::uint64_t unsent();
  StreamLink& connection(std::size_t index) { return index == 0 ? first_ : *lanes_[index - 1].stream; }

  bool read_lanes(Inbox& inbox, std::size_t budget);
  void lane_ended(std::size_t lane, const std::string& why);
  ReceiveState receive_state(bool more, bool to_send);
  void fail(std::string why);

  const Striping striping_;
  StreamLink first_;
  UniqueFd epoll_;  // of the lanes
  std::array<Lane, kMaxLanes> lanes_;
  std::atomic<std::size_t> open_ = 0;  // number of lanes; written by the receiving thread
  std::mutex interest_mutex_;
  std::atomic<bool> closed_ = false;
  std::atomic<std::uint64_t> large_bytes_ = 0;  // bytes of large messages in both directions

  mutable std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> broken_ = false;

  // Sending thread only.
  LaneSpeeds speeds_;
  std::array<Fragment, kMaxLanes + 1> fragments_;
  std::uint64_t next_out_ = 0;  // number of the next fragmented message
  bool waits_for_first_ = true;
  struct {
    bool active = false;
    bool framed = false;  // its frame has been sent
    std::size_t connections = 1;
    Nanos start = 0;
    std::uint64_t unsent = 0;  // bytes in the socket buffers when it began
    std::uint64_t bytes = 0;
    std::size_t segment = 0;  // where the next fragment begins
    std::uint64_t offset = 0, place = 0;
  } large_;

  // Receiving thread only.
  Reassembler reassembler_;
  LanedLink* lane_of_ = nullptr;  // if set, this link is a lane of that one, which owns its data
  bool lanes_due_ = false;
  Limits limits_;
  bool ended_ = false;      // the first connection has ended,
  Nanos drain_until_ = 0;   // and lanes may still deliver data until then
  std::string lane_error_;  // why the link is about to end
};

}  // namespace telegrad

// A link over a byte stream that sends large messages in fragments (transports/fragments), with optional lanes: further
// connections to the same end.
//
// The first connection carries all frames except fragments, in order. Fragments use the first connection until there
// are lanes. Then they use one lane, so that other messages do not queue behind them in the sockets, or they are
// striped over all connections, whichever was faster (LaneSpeeds). The next connection that is writable gets the next
// fragment, so a slow lane does not delay the others. A fragment that arrives before the frame of its message is
// buffered and copied, and its lane is not read meanwhile.
//
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
#include "transports/fragments/fragments.h"
#include "transports/fragments/reassembler.h"
#include "transports/stream/stream_link.h"

namespace telegrad {

/// Parameters of fragments and lanes.
struct Striping {
  FragmentSizes sizes;
  std::uint64_t striped = 4 << 20;  // least size of a message that may be striped over several lanes
  bool measured = true;             // stripe only while that is faster; else always
  bool lanes = true;                // the link may have lanes
};

/// Measured rates over all connections and over one. Lanes help if each connection is limited on its
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
  bool is_large(const Outgoing& message) const override;
  SendState send_between(Outgoing& message) override;
  bool buffer(const Outgoing& message) override { return !sends_no_more_ && first_.buffer(message); }
  SendState flush() override;
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
  LinkError error() const override;
  bool violated() const override { return violated_ || first_.violated(); }
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
  class LaneInbox;

  void count(std::uint64_t bytes);
  void watch(std::size_t lane, bool Lane::* what, bool on);
  SendState send_large(Outgoing& message);
  SendState send_frame();
  SendState send_fragments(Outgoing& message);
  SendState send_fragment(std::size_t connection);
  SendState broken();
  std::uint64_t unsent();
  StreamLink& connection(std::size_t index) { return index == 0 ? first_ : *lanes_[index - 1].stream; }

  bool read_lanes(Inbox& inbox, std::size_t budget);
  void lane_ended(std::size_t lane, const LinkError& why);
  ReceiveState receive_state(bool more, bool to_send);
  void fail(LinkError why);

  const Striping striping_;
  StreamLink first_;
  UniqueFd epoll_;  // of the lanes
  std::array<Lane, kMaxLanes> lanes_;
  std::atomic<std::size_t> open_ = 0;  // number of lanes; written by the receiving thread
  std::mutex interest_mutex_;
  std::atomic<bool> closed_ = false;
  std::atomic<std::uint64_t> large_bytes_ = 0;  // bytes of large messages in both directions

  mutable std::mutex error_mutex_;
  LinkError error_;
  std::atomic<bool> broken_ = false;
  std::atomic<bool> violated_ = false;  // by what arrived on a lane, or by fragments

  // Sending thread only.
  LaneSpeeds speeds_;
  std::array<Fragment, kMaxLanes + 1> fragments_;  // one for each connection
  Fragmenter fragmenter_;
  bool waits_for_first_ = true;
  bool sends_no_more_ = false;  // a connection has broken in the middle of a large message
  struct {
    Outgoing* message = nullptr;     // null: none is being sent
    bool framed = false;             // its frame has been sent
    std::size_t first = 0, end = 1;  // connections for its fragments
    Nanos start = 0;
    std::uint64_t unsent = 0;  // bytes in the socket buffers when it began
    std::uint64_t bytes = 0;
  } large_;

  // Receiving thread only.
  Reassembler reassembler_;
  FragmentSource lane_source_{reassembler_};
  LanedLink* lane_of_ = nullptr;  // if set, this link is a lane of that one, which owns its data
  bool lanes_due_ = false;
  Limits limits_;
  bool ended_ = false;     // the first connection has ended,
  Nanos drain_until_ = 0;  // and lanes may still deliver data until then
  LinkError lane_error_;   // why the link is about to end
};

}  // namespace telegrad

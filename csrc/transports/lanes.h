// A link over TCP that can have lanes: more connections to the same end, over which large messages are spread.
//
// Its first connection carries all frames, in order. The large segments of a scattered message are not in its frame:
// their headers have the lease kScattered, and their bytes follow in pieces, frames of type kPiece, over all lanes, the
// first connection included. Whichever takes bytes gets the next piece, so that a slow lane holds up nobody. Messages
// are scattered one at a time, and both ends count them, which is their number:
//     FrameHeader   type kPiece, call_id: the number of the message, timeout: where its bytes belong in the scattered
//                   segments, laid end to end
//     SegmentHeader the size, lease 0
// A piece is read straight into its place. One that overtakes the frame of its message is kept, and copied, while its
// lane waits. Messages are delivered in the order of their frames.
//
// How many lanes are used, each end finds out for what it sends (lane_choice.h). There is one more descriptor,
// `lanes_fd`, an epoll of the lanes: they need not be known one by one to who polls.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/descriptor.h"
#include "transports/lane_choice.h"
#include "transports/scattered.h"
#include "transports/stream.h"

namespace telegrad {

/// What is spread over lanes.
struct Spread {
  std::uint64_t message = 4 << 20;    // messages with so many bytes in
  std::uint64_t segment = 256 << 10;  // segments of at least this size,
  std::uint64_t piece = 512 << 10;    // in pieces of this size
  bool measured = true;               // over as many as have proven best; else over all
};

class LanedLink final : public Link {
 public:
  LanedLink(Descriptor socket, std::string description, bool connecting, const SocketKind& kind, Spread spread = {});
  ~LanedLink() override;

  int fd() const override { return first_.fd(); }
  SendState send(Outgoing& message) override;
  bool hold(const Outgoing& message) override { return first_.hold(message); }
  SendState release() override { return first_.release(); }
  ReceiveState receive(Inbox& inbox, std::size_t budget) override;
  bool wants_lanes() const override;
  bool add_lane(std::shared_ptr<Link> lane) override;
  std::size_t lanes() const override { return open_.load(std::memory_order_acquire); }
  int lanes_fd() const override { return epoll_.get(); }
  void look_at_lanes() override { looked_for_ = true; }
  bool waits_for_fd() const override { return waits_for_first_; }
  std::vector<int> descriptors() const override;
  void set_limits(const Limits& limits) override;
  void close() override;
  std::string error() const override;
  PeerUser peer_user(UserLookup& lookup) const override { return first_.peer_user(lookup); }
  std::string source() const override { return first_.source(); }
  std::string describe() const override { return first_.describe(); }

 private:
  static constexpr std::size_t kMost = 15;  // lanes besides the first connection

  struct Lane {
    std::shared_ptr<Link> owner;  // keeps the stream
    StreamLink* stream = nullptr;
    bool ended = false;                 // the receiving thread's
    bool paused = false;                // and so is this: it is not read for the moment
    bool reads = true, writes = false;  // what the epoll tells of; under interest_mutex_
  };
  struct Piece {  // on its way over one connection
    Outgoing out;
    bool busy = false;
    std::size_t segment = 0;   // of the message
    std::uint64_t offset = 0;  // in that segment
  };
  class Taker;

  void count(std::uint64_t bytes);
  void watch(std::size_t lane, bool Lane::* what, bool on);
  SendState send_large(Outgoing& message);
  SendState send_pieces(Outgoing& message);
  SendState push(Outgoing& message, std::size_t connection);
  bool cut(Outgoing& message, Piece& piece);
  StreamLink& connection(std::size_t index) { return index == 0 ? first_ : *lanes_[index - 1].stream; }
  std::uint64_t queued();
  void finish();

  bool read_lanes(Inbox& inbox, std::size_t budget);
  void lane_ended(std::size_t lane, const std::string& why);
  ReceiveState verdict(bool more);
  void fail(std::string why);

  const Spread spread_;
  StreamLink first_;
  Descriptor epoll_;  // of the lanes
  std::array<Lane, kMost> lanes_;
  std::atomic<std::size_t> open_ = 0;  // how many of them there are; written by the receiving thread
  std::mutex interest_mutex_;
  std::atomic<bool> closed_ = false;
  std::atomic<std::uint64_t> moved_ = 0;  // bytes of large messages, either way

  mutable std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> broken_ = false;

  // The sending thread's.
  LaneChoice choice_;
  std::array<Piece, kMost + 1> pieces_;
  std::uint64_t next_out_ = 0;  // the number of the next message that is scattered
  bool waits_for_first_ = true;
  struct {
    bool under_way = false;
    bool framed = false;  // its frame has left
    std::size_t connections = 1;
    Nanos start = 0;
    std::uint64_t queued = 0;  // bytes that the system had not got rid of then
    std::uint64_t bytes = 0;
    std::size_t segment = 0;  // where the next piece is cut
    std::uint64_t offset = 0, place = 0;
  } large_;

  // The receiving thread's.
  Scattered scattered_;
  LanedLink* lane_of_ = nullptr;  // then everything is that one's
  bool looked_for_ = false;
  Limits limits_;
  bool ended_ = false;      // the first connection is at its end,
  Nanos patience_ = 0;      // and lanes may have something until then
  std::string lane_error_;  // why the link is about to end
};

}  // namespace telegrad

// Lanes: further connections for links with large messages. See Link::wants_lanes.
#include <sys/resource.h>

#include <utility>

#include "core/engine_parts.h"
#include "core/peers.h"
#include "core/tuning.h"

namespace telegrad {
namespace {

/// Returns whether a process with this number of connections may have this number of lanes for each.
bool fits_descriptor_limit(std::size_t connections, std::size_t lanes) {
  rlimit most;
  return getrlimit(RLIMIT_NOFILE, &most) != 0 || connections * lanes <= most.rlim_cur / kLanesShare;
}

}  // namespace

void Peers::open_lanes(const ConnectionPtr& c) {
  if (!c->initiator || c->has_asked_for_lanes || c->state != Connection::State::kOpen || !c->link->wants_lanes())
    return;
  c->has_asked_for_lanes = true;
  const std::uint32_t lanes = c->handshake.lanes();
  {
    Lock lock(parts_.mutex);
    if (parts_.is_stopping() || !fits_descriptor_limit(connections_.size(), lanes)) return;
  }
  for (std::uint32_t i = 1; i < lanes; ++i) open_lane(c);
}

void Peers::open_lane(const ConnectionPtr& c) {
  try {
    const std::string address = c->link->describe();
    auto link = find_transport(address)->connect(address, parts_.settings.security);
    Handshake handshake =
        Handshake::initiate(parts_.settings.handshake, c->handshake.peer(), {}, Purpose::kLane, c->handshake.link());
    const Handshake::Step hello = handshake.begin();
    ConnectionPtr lane;
    {
      Lock lock(parts_.mutex);
      if (parts_.is_stopping() || !has_connection(c->id)) return;  // `stop` or `close_connection` would miss it
      lane = add_connection(std::move(link), std::move(handshake), true);
      lane->lane_of = c;
      lane->peer = c->peer;
    }
    parts_.sender.transmit(lane, frame(hello));
  } catch (const std::exception& e) {  // no descriptor or no random bytes
    Lock lock(parts_.mutex);
    parts_.queue.log(std::string("no further lane: ") + e.what());
  }
}

/// Adds an authenticated connection to the link named in its handshake. From now on it belongs to that link, at both
/// ends.
void Peers::attach_lane(const ConnectionPtr& lane) {
  const Identity& remote = lane->handshake.peer();
  ConnectionPtr link;
  bool taken = false;
  bool welcomed;
  {
    MutexLock lock(lane->send_mutex);
    welcomed = lane->queue.empty();
  }
  if (!welcomed) return close_connection(lane, "its welcome could not be sent");
  {
    Lock lock(parts_.mutex);
    for (auto& [token, c] : connections_) {
      const bool same = c->state == Connection::State::kOpen && c->peer == remote.id &&
                        c->handshake.peer().incarnation == remote.incarnation &&
                        c->handshake.link() == lane->handshake.link();
      if (same && c->link->lanes() + 1 < c->handshake.lanes()) link = c;
    }
    if (link && connections_.contains(lane->id)) {
      const bool first = link->link->lanes_fd() < 0;
      parts_.leader.remove_fd(lane->link->fd());
      taken = link->link->add_lane(std::shared_ptr<Link>(lane, lane->link.get()));
      if (taken) {
        parts_.leader.mark_closed(*lane);  // it is no longer a connection of its own
        lane->lane_of.reset();
        connections_.erase(lane->id);
        if (first) parts_.leader.add_fd(link->link->lanes_fd(), link->id | kLanesBit);
        new_lane_links_.push_back(link);
      }
    }
  }
  if (!taken) close_connection(lane, link ? "its link accepts no lane" : "it is a lane of an unknown link");
}

}  // namespace telegrad

// Lanes: further connections for links with large messages. See Link::wants_lanes.
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/engine.h"

namespace telegrad {
namespace {

constexpr std::size_t kShare = 4;  // lanes may need at most 1/4 of the descriptors

/// Returns whether a process with this number of connections may have this number of lanes for each.
bool fits_descriptor_limit(std::size_t connections, std::size_t lanes) {
  rlimit most;
  return getrlimit(RLIMIT_NOFILE, &most) != 0 || connections * lanes <= most.rlim_cur / kShare;
}

}  // namespace

std::unique_ptr<Outgoing> Engine::frame(const Handshake::Step& step) {
  auto m = std::make_unique<Outgoing>();
  m->header.type = *step.send;
  struct Text final : KeepAlive {
    std::string text;
  };
  auto owner = std::make_unique<Text>();
  owner->text = step.body;
  m->body = owner->text;
  m->owner = std::move(owner);
  return m;
}

/// Opens lanes if the link wants some after large messages. Leader only, while no lock is held.
void Engine::open_lanes(const ConnectionPtr& c) {
  if (!c->initiator || c->has_asked_for_lanes || c->state != Connection::State::kOpen || !c->link->wants_lanes())
    return;
  c->has_asked_for_lanes = true;
  const std::uint32_t lanes = c->handshake.lanes();
  {
    std::lock_guard lock(mutex_);
    if (stopping() || !fits_descriptor_limit(connections_.size(), lanes)) return;
  }
  for (std::uint32_t i = 1; i < lanes; ++i) open_lane(c);
}

void Engine::open_lane(const ConnectionPtr& c) {
  try {
    const std::string address = c->link->describe();
    auto link = find_transport(address)->connect(address);
    Handshake handshake = Handshake::initiate(settings_.handshake, c->handshake.peer(), c->handshake.session());
    const Handshake::Step hello = handshake.begin();
    ConnectionPtr lane;
    {
      std::lock_guard lock(mutex_);
      lane = add_connection(std::move(link), std::move(handshake), true);
      lane->lane_of = c;
      lane->peer = c->peer;
    }
    transmit(lane, frame(hello));
  } catch (const std::exception& e) {  // no descriptor or no random bytes
    std::lock_guard lock(mutex_);
    log(std::string("no further lane: ") + e.what());
  }
}

/// Adds an authenticated connection to the link named in its handshake. From now on it belongs to that link, at both
/// ends.
void Engine::attach_lane(const ConnectionPtr& lane) {
  const Identity& who = lane->handshake.peer();
  ConnectionPtr link;
  bool taken = false;
  bool welcomed;
  {
    std::lock_guard lock(lane->send_mutex);
    welcomed = lane->queue.empty();
  }
  if (!welcomed) return close_connection(lane, "its welcome could not be sent");
  {
    std::lock_guard lock(mutex_);
    for (auto& [token, c] : connections_) {
      const bool same = c->state == Connection::State::kOpen && c->peer == who.id &&
                        c->handshake.peer().incarnation == who.incarnation &&
                        c->handshake.session() == lane->handshake.session();
      if (same && c->link->lanes() + 1 < c->handshake.lanes()) link = c;
    }
    if (link && connections_.contains(lane->id)) {
      const bool first = link->link->lanes_fd() < 0;
      epoll_ctl(links_epoll_.get(), EPOLL_CTL_DEL, lane->link->fd(), nullptr);
      taken = link->link->add_lane(std::shared_ptr<Link>(lane, lane->link.get()));
      if (taken) {
        mark_closed(*lane);  // it is no longer a connection of its own
        lane->lane_of.reset();
        connections_.erase(lane->id);
        if (first) {
          epoll_event event{.events = EPOLLIN, .data = {.u64 = link->id | kLanesBit}};
          epoll_ctl(links_epoll_.get(), EPOLL_CTL_ADD, link->link->lanes_fd(), &event);
        }
        new_lane_links_.push_back(link);
      }
    }
  }
  if (!taken) close_connection(lane, link ? "its link accepts no lane" : "it is a lane of an unknown link");
}

}  // namespace telegrad

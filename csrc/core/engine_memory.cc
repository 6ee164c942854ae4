// Memory that links share with their peers, for sending without a copy.
#include <new>
#include <utility>

#include "core/engine.h"

namespace telegrad {

std::optional<BufferLease> Engine::lease(std::int32_t peer, std::uint64_t connection, std::size_t size) {
  ConnectionPtr c;
  {
    std::lock_guard lock(mutex_);
    const auto asked = connections_.find(connection);
    const auto known = peers_.find(peer);
    if (asked != connections_.end() && (peer < 0 || asked->second->peer == peer)) {
      c = asked->second;
    } else if (known != peers_.end()) {
      c = known->second.link;
    }
    if (stopping() || !c || c->state != Connection::State::kOpen) return std::nullopt;
  }
  auto leased = c->link->lease(size);
  if (!leased) return std::nullopt;
  try {
    return BufferLease{.connection = c->id, .lease = leased->lease, .memory = pool_->adopt(std::move(leased->memory))};
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

std::shared_ptr<MulticastBuffer> Engine::allocate_multicast(std::span<const std::int32_t> peers, std::size_t size) {
  std::shared_ptr<MulticastBuffer> buffer = multicast_arena_->allocate(size);
  if (!buffer) return nullptr;
  std::vector<ConnectionPtr> links;
  {
    std::lock_guard lock(mutex_);
    for (const std::int32_t peer : peers) {
      const auto found = peers_.find(peer);
      if (found != peers_.end() && found->second.link) links.push_back(found->second.link);
    }
    arm_timer(now() + kTrimInterval);
  }
  for (const auto& c : links) {
    if (c->state == Connection::State::kOpen) c->link->announce(*buffer);
  }
  return buffer;
}

}  // namespace telegrad

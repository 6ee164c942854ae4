// Memory that links share with their peers, for what the program sends.
#include <new>
#include <utility>

#include "core/engine.h"

namespace telegrad {

std::optional<Loan> Engine::lend(std::int32_t peer, std::uint64_t connection, std::size_t size) {
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
  auto lent = c->link->lend(size);
  if (!lent) return std::nullopt;
  try {
    return Loan{.connection = c->id, .lease = lent->lease, .memory = pool_->count(std::move(lent->memory))};
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

}  // namespace telegrad

#include "transports/commons.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "core/forks.h"
#include "transports/arena.h"

namespace telegrad {
namespace {

constexpr std::size_t kLeastChunk = std::size_t{8} << 20;
constexpr Nanos kPause = kSecond;  // before a system that has refused memory is asked again

/// One lock for all objects, as critical sections are short. Forks wait for it, and for those of arenas before it.
std::mutex& lock_of_all() {
  static auto* m = new std::mutex;  // never destroyed: messages may outlive static objects
  return *m;
}

/// Held while a chunk is created, which takes as long as filling it. The lock above may be taken after it.
std::mutex& growing() {
  static auto* m = new std::mutex;
  return *m;
}

[[maybe_unused]] const bool held = hold_at_forks(growing()) && hold_at_forks(lock_of_all());

using Guard = std::lock_guard<std::mutex>;

}  // namespace

Common::~Common() { commons_->let_go(lease_); }

std::shared_ptr<Common> Commons::put(std::size_t size) {
  if (size > limit_) return nullptr;
  collect();
  try {
    {
      Guard guard(lock_of_all());
      if (auto found = take(size)) return found;
    }
    std::lock_guard grows(growing());
    Chunk chunk;
    std::size_t room;
    {
      Guard guard(lock_of_all());
      if (auto found = take(size)) return found;  // another thread has made room meanwhile
      room = room_for(size);
    }
    if (room == 0) return nullptr;
    chunk.memory = SharedMemory::create(room, true);
    chunk.memory.reserve(0, room);
    chunk.memory.keep_from_forks();
    Guard guard(lock_of_all());
    chunk.idle_since = now();
    total_ += room;
    free_.add(next_, 0, room);
    chunks_.emplace(next_++, std::move(chunk));
    return take(size);
  } catch (const std::system_error&) {  // the system has no memory or no descriptor for it
    Guard guard(lock_of_all());
    no_growth_before_ = now() + kPause;
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

/// Processes the leases that receivers have returned.
void Commons::collect() {
  std::vector<std::weak_ptr<Arena>> arenas;
  {
    Guard guard(lock_of_all());
    std::erase_if(arenas_, [](const auto& arena) { return arena.expired(); });
    arenas = arenas_;
  }
  for (const auto& arena : arenas) {
    if (const auto here = arena.lock()) here->collect();
  }
}

/// Requires the lock, as do the functions below.
std::shared_ptr<Common> Commons::take(std::size_t length) {
  const std::size_t size = region_size(length);
  const auto place = free_.take(size);
  if (!place) return nullptr;
  Chunk& chunk = chunks_.at(place->chunk);
  const std::uint64_t lease = Lease::of(place->chunk, place->offset);
  pieces_.emplace(lease, Piece{.size = size, .holders = 1});
  ++chunk.pieces;
  return std::make_shared<Common>(lease, chunk.memory.data() + place->offset, length, shared_from_this());
}

/// Returns the size of the next chunk; 0 if the limit allows none.
std::size_t Commons::room_for(std::size_t length) {
  if (now() < no_growth_before_) return 0;
  const std::size_t size = region_size(length);
  for (auto chunk = chunks_.begin(); chunk != chunks_.end() && total_ + size > limit_;) {
    const auto looked_at = chunk++;
    if (looked_at->second.pieces == 0) drop(looked_at);
  }
  if (total_ + size > limit_) return 0;
  return whole_pages(std::max(size, std::min<std::size_t>(kLeastChunk, limit_ - total_)));
}

void Commons::drop(Chunks::iterator chunk) {
  free_.forget(chunk->first);
  total_ -= chunk->second.memory.size();
  chunks_.erase(chunk);
}

void Commons::trim(Nanos before) {
  collect();
  Guard guard(lock_of_all());
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto looked_at = chunk++;
    if (looked_at->second.pieces == 0 && looked_at->second.idle_since < before) drop(looked_at);
  }
}

Commons::Stats Commons::stats() {
  collect();
  Guard guard(lock_of_all());
  return {.pieces = pieces_.size(), .bytes = total_};
}

// ---- for arenas

void Commons::join(const std::weak_ptr<Arena>& arena) {
  Guard guard(lock_of_all());
  arenas_.push_back(arena);
}

Commons::Offer Commons::offer(std::uint32_t number) {
  Guard guard(lock_of_all());
  const SharedMemory& memory = chunks_.at(number).memory;
  return {.size = memory.size(), .file = memory.file()};
}

bool Commons::has(std::uint32_t number) {
  Guard guard(lock_of_all());
  return chunks_.contains(number);
}

void Commons::hold(std::uint64_t lease) {
  Guard guard(lock_of_all());
  ++pieces_.at(lease).holders;
}

void Commons::let_go(std::uint64_t lease) {
  Guard guard(lock_of_all());
  const auto piece = pieces_.find(lease);
  if (--piece->second.holders > 0) return;
  const auto chunk = chunks_.find(Lease::chunk(lease));
  if (!chunk->second.given_up) free_.add(chunk->first, Lease::offset(lease), piece->second.size);
  pieces_.erase(piece);
  if (--chunk->second.pieces > 0) return;
  chunk->second.idle_since = now();
  if (chunk->second.given_up) drop(chunk);
}

void Commons::give_up(std::uint64_t lease) {
  {
    Guard guard(lock_of_all());
    Chunk& chunk = chunks_.at(Lease::chunk(lease));
    chunk.given_up = true;
    free_.forget(Lease::chunk(lease));
  }
  let_go(lease);
}

}  // namespace telegrad

#include "memory/multicast_arena.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "base/fork_handlers.h"
#include "memory/arena.h"

namespace telegrad {
namespace {

constexpr std::size_t kMinChunk = std::size_t{8} << 20;
constexpr Nanos kGrowthPause = kSecond;  // before a system that has refused memory is asked again

/// Returns the lock of all objects: critical sections are short. Forks wait for it, and for those of arenas before it.
std::mutex& arena_mutex() {
  static auto* m = new std::mutex;  // never destroyed: messages may outlive static objects
  return *m;
}

/// Held while a chunk is created, which takes as long as filling it. The lock above may be taken after it.
std::mutex& growth_mutex() {
  static auto* m = new std::mutex;
  return *m;
}

[[maybe_unused]] const bool registered = lock_at_fork(growth_mutex()) && lock_at_fork(arena_mutex());

using Guard = std::lock_guard<std::mutex>;

}  // namespace

MulticastBuffer::~MulticastBuffer() { arena_->remove_holder(lease_); }

std::shared_ptr<MulticastBuffer> MulticastArena::allocate(std::size_t size) {
  if (size > limit_) return nullptr;
  collect();
  try {
    {
      Guard guard(arena_mutex());
      if (auto found = take_free(size)) return found;
    }
    std::lock_guard grows(growth_mutex());
    Chunk chunk;
    std::size_t chunk_size;
    {
      Guard guard(arena_mutex());
      if (auto found = take_free(size)) return found;  // another thread has made room meanwhile
      chunk_size = chunk_size_for(size);
    }
    if (chunk_size == 0) return nullptr;
    auto share = BudgetShare::take(budget_, chunk_size);
    if (!share) return nullptr;
    chunk.share = std::move(*share);
    chunk.memory = SharedMemory::create(chunk_size, true);
    chunk.memory.reserve(0, chunk_size);
    chunk.memory.exclude_from_forks();
    Guard guard(arena_mutex());
    chunk.idle_since = now();
    total_ += chunk_size;
    free_.add(next_, 0, chunk_size);
    chunks_.emplace(next_++, std::move(chunk));
    return take_free(size);
  } catch (const std::system_error&) {  // the system has no memory or no descriptor for it
    Guard guard(arena_mutex());
    no_growth_before_ = now() + kGrowthPause;
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

/// Processes the leases that receivers have returned.
void MulticastArena::collect() {
  std::vector<std::weak_ptr<Arena>> arenas;
  {
    Guard guard(arena_mutex());
    std::erase_if(arenas_, [](const auto& arena) { return arena.expired(); });
    arenas = arenas_;
  }
  for (const auto& arena : arenas) {
    if (const auto current = arena.lock()) current->collect();
  }
}

/// Requires the lock, as do the functions below.
std::shared_ptr<MulticastBuffer> MulticastArena::take_free(std::size_t length) {
  const std::size_t size = region_size(length);
  const auto place = free_.allocate(size);
  if (!place) return nullptr;
  Chunk& chunk = chunks_.at(place->chunk);
  const std::uint64_t lease = Lease::of(place->chunk, place->offset);
  buffers_.emplace(lease, Buffer{.size = size, .holders = 1});
  ++chunk.buffers;
  return std::make_shared<MulticastBuffer>(lease, chunk.memory.data() + place->offset, length, shared_from_this());
}

/// Returns the size of the next chunk; 0 if the limit allows none.
std::size_t MulticastArena::chunk_size_for(std::size_t length) {
  if (now() < no_growth_before_) return 0;
  const std::size_t size = region_size(length);
  for (auto chunk = chunks_.begin(); chunk != chunks_.end() && total_ + size > limit_;) {
    const auto candidate = chunk++;
    if (candidate->second.buffers == 0) drop(candidate);
  }
  if (total_ + size > limit_) return 0;
  return whole_pages(std::max(size, std::min<std::size_t>(kMinChunk, limit_ - total_)));
}

void MulticastArena::drop(Chunks::iterator chunk) {
  free_.remove_chunk(chunk->first);
  total_ -= chunk->second.memory.size();
  chunks_.erase(chunk);
}

void MulticastArena::trim(Nanos before) {
  collect();
  Guard guard(arena_mutex());
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto candidate = chunk++;
    if (candidate->second.buffers == 0 && candidate->second.idle_since < before) drop(candidate);
  }
}

MulticastArena::Stats MulticastArena::stats() {
  collect();
  Guard guard(arena_mutex());
  return {.buffers = buffers_.size(), .bytes = total_};
}

// ---- for arenas

void MulticastArena::add_arena(const std::weak_ptr<Arena>& arena) {
  Guard guard(arena_mutex());
  arenas_.push_back(arena);
}

MulticastArena::Offer MulticastArena::offer(std::uint32_t number) {
  Guard guard(arena_mutex());
  const SharedMemory& memory = chunks_.at(number).memory;
  return {.size = memory.size(), .file = memory.file()};
}

bool MulticastArena::has(std::uint32_t number) {
  Guard guard(arena_mutex());
  return chunks_.contains(number);
}

void MulticastArena::add_holder(std::uint64_t lease) {
  Guard guard(arena_mutex());
  ++buffers_.at(lease).holders;
}

void MulticastArena::remove_holder(std::uint64_t lease) {
  Guard guard(arena_mutex());
  const auto buffer = buffers_.find(lease);
  if (--buffer->second.holders > 0) return;
  const auto chunk = chunks_.find(Lease::chunk(lease));
  if (!chunk->second.abandoned) free_.add(chunk->first, Lease::offset(lease), buffer->second.size);
  buffers_.erase(buffer);
  if (--chunk->second.buffers > 0) return;
  chunk->second.idle_since = now();
  if (chunk->second.abandoned) drop(chunk);
}

void MulticastArena::abandon(std::uint64_t lease) {
  {
    Guard guard(arena_mutex());
    Chunk& chunk = chunks_.at(Lease::chunk(lease));
    chunk.abandoned = true;
    free_.remove_chunk(Lease::chunk(lease));
  }
  remove_holder(lease);
}

}  // namespace telegrad

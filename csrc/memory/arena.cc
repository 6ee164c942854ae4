#include "memory/arena.h"

#include <algorithm>
#include <bit>
#include <new>
#include <system_error>
#include <utility>

namespace telegrad {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kReserveStep = 8 * kMiB;    // pages of a chunk are reserved in steps of this size
constexpr std::size_t kMinChunk = 256 << 10;      // a chunk is small, for many workers of a host exchange little;
constexpr std::size_t kRegionsPerChunk = 8;       // it has room for this number of the wanted regions,
constexpr std::size_t kMaxForRegions = 8 * kMiB;  // up to this size; and it is as large as all earlier ones together,
constexpr std::size_t kMaxChunk = 64 * kMiB;      // up to this size, unless a region needs more
constexpr std::size_t kMinSpinSize = kMiB;        // least size of a region for which to wait briefly:
constexpr Nanos kReturnSpin = 30 * kMicrosecond;  // copying it takes longer than this
constexpr Nanos kGrowthPause = kSecond;           // before a system or a peer that has refused is asked again

}  // namespace

/// Block that holds a region, or a part of it, for the program.
class Arena::Holder final : public Block {
 public:
  Holder(const Allocation& place, std::size_t size, std::shared_ptr<Arena> arena)
      : Block(place.data, size), lease_(place.lease), arena_(std::move(arena)) {}
  ~Holder() override { arena_->release(lease_); }
  std::uint64_t lease() const override { return lease_; }

 private:
  const std::uint64_t lease_;
  const std::shared_ptr<Arena> arena_;
};

std::shared_ptr<Arena> Arena::make(ReleaseQueue* releases) {
  std::shared_ptr<Arena> arena(new Arena(releases));
  register_fork_handler(arena.get(), ForkLevel::kArena);
  return arena;
}

Arena::~Arena() { unregister_fork_handler(this, ForkLevel::kArena); }

void Arena::set_budget(std::shared_ptr<MemoryBudget> budget) {
  MutexLock lock(mutex_);
  budget_ = std::move(budget);
}

// ---- leases

std::optional<Arena::Allocation> Arena::allocate(std::size_t size) { return allocate(size, false); }

std::optional<Arena::Allocation> Arena::allocate(std::size_t size, bool leased) {
  if (size > limit_.load(std::memory_order_relaxed)) return std::nullopt;
  MutexLock lock(mutex_);
  if (!releases_) return std::nullopt;
  process_returns();
  auto place = try_allocate(size, leased);
  if (!place && size >= kMinSpinSize && outstanding_ > 0) {
    // Most often the receiver has just replied and is about to return its leases.
    for (const Nanos until = now() + kReturnSpin; !place && now() < until;) {
      if (process_returns()) place = try_allocate(size, leased);
    }
  }
  if (!place && has_slot()) {
    wanted_.store(std::max(wanted_.load(std::memory_order_relaxed), region_size(size)), std::memory_order_relaxed);
  }
  return place;
}

std::optional<Arena::Allocation> Arena::try_allocate(std::size_t length, bool leased) {
  if (!has_slot()) return std::nullopt;
  const std::size_t size = region_size(length);
  const auto found = free_.allocate(size);
  if (!found) return std::nullopt;
  const std::uint64_t lease = Lease::of(found->chunk, found->offset);
  regions_.emplace(lease, Region{.size = size, .holders = 1, .leased = leased});
  chunks_.at(found->chunk).used += size;
  return Allocation{.lease = lease, .data = data_of(lease)};
}

std::optional<LinkLease> Arena::lease(std::size_t size) {
  const auto found = allocate(size, true);
  if (!found) return std::nullopt;
  return LinkLease{.lease = found->lease, .memory = std::make_unique<Holder>(*found, size, shared_from_this())};
}

void Arena::pass(std::uint64_t lease) {
  MutexLock lock(mutex_);
  Region& region = regions_.at(lease);
  region.holders = 0;
  region.passed = true;
  ++outstanding_;
}

std::uint64_t Arena::pass_leased(const OutSegment& s) {
  MutexLock lock(mutex_);
  const auto found = region_of(s.lease);
  if (!releases_ || found == regions_.end() || outstanding_ >= ReleaseQueue::kSlots) return 0;
  auto& [lease, region] = *found;
  if (!is_held_by_program(region) || region.is_private) return 0;
  const std::byte* data = data_of(lease);
  if (s.data < data || s.data + s.size > data + region.size) return 0;
  const auto begin = static_cast<std::size_t>(s.data - data);
  if (begin % kAlignment != 0) return 0;
  region.passed = true;
  ++outstanding_;
  return Lease::of(Lease::chunk(lease), Lease::offset(lease) + begin);
}

BlockPtr Arena::take_returned(std::uint64_t lease, std::size_t size) {
  MutexLock lock(mutex_);
  const auto found = region_of(lease);
  if (!releases_ || found == regions_.end()) return nullptr;
  auto& [first, region] = *found;
  const std::size_t begin = Lease::offset(lease) - Lease::offset(first);
  if (!region.passed || size > region.size - begin) return nullptr;
  auto block =
      std::make_unique<Holder>(Allocation{.lease = first, .data = data_of(first) + begin}, size, shared_from_this());
  region.passed = false;
  region.leased = true;
  ++region.holders;  // the message that carried it may still hold it
  --outstanding_;
  return block;
}

/// Returns the region that contains a lease.
Arena::Regions::iterator Arena::region_of(std::uint64_t lease) {
  const auto next = regions_.upper_bound(lease);
  if (next == regions_.begin()) return regions_.end();
  const auto region = std::prev(next);
  const bool within = Lease::chunk(lease) == Lease::chunk(region->first) &&
                      Lease::offset(lease) - Lease::offset(region->first) < region->second.size;
  return within ? region : regions_.end();
}

std::byte* Arena::data_of(std::uint64_t lease) {
  return chunks_.at(Lease::chunk(lease)).memory.data() + Lease::offset(lease);
}

void Arena::release(std::uint64_t lease) {
  MutexLock lock(mutex_);
  const auto region = regions_.find(lease);
  --region->second.holders;
  if (!forked_) free_if_unused(region);
}

/// Processes returned leases; returns whether there were any.
bool Arena::process_returns() {
  const std::uint64_t returned = releases_->returned.load(std::memory_order_acquire);
  if (returned == consumed_) return false;
  bool valid = returned - consumed_ <= outstanding_;
  for (; valid && consumed_ != returned; ++consumed_) {
    const std::uint64_t lease = releases_->leases[consumed_ % ReleaseQueue::kSlots].load(std::memory_order_relaxed);
    valid = process_return(lease);
  }
  releases_->consumed.store(consumed_, std::memory_order_release);
  if (!valid) {
    corrupt_ = true;
    releases_ = nullptr;
  }
  return valid;
}

/// Processes one returned lease; false if the receiver does not have it.
bool Arena::process_return(std::uint64_t lease) {
  if (Lease::is_multicast(lease)) {
    if (multicast_leases_.erase(lease) == 0) return false;
    multicast_arena_->remove_holder(lease);
  } else {
    const auto region = region_of(lease);
    if (region == regions_.end() || !region->second.passed) return false;
    region->second.passed = false;
    free_if_unused(region);
  }
  --outstanding_;
  return true;
}

void Arena::free_if_unused(Regions::iterator region) {
  const auto& [lease, r] = *region;
  if (r.holders > 0 || r.passed) return;
  if (releases_ && r.is_private && !chunks_.at(Lease::chunk(lease)).memory.make_shared(data_of(lease), r.size)) return;
  const std::uint32_t number = Lease::chunk(lease);
  const auto found = chunks_.find(number);
  Chunk& chunk = found->second;
  chunk.used -= r.size;
  if (chunk.used == 0) chunk.idle_since = now();
  if (releases_) free_.add(number, Lease::offset(lease), r.size);
  regions_.erase(region);
  if (!releases_ && chunk.used == 0) drop(found);
}

// ---- chunks

Arena::Growth Arena::grow(Messenger& messenger) {
  if (!mutex_.try_lock()) return Growth::kMore;
  MutexLock lock(mutex_, std::adopt_lock);
  if (!releases_ || wanted_.load(std::memory_order_relaxed) == 0) return Growth::kNone;
  const Nanos at = now();
  if (at < no_growth_before_) return Growth::kNone;
  try {
    if (growing_chunk_ == 0 && !begin_chunk(messenger)) return stop_growing(at);
    const auto found = chunks_.find(growing_chunk_);
    Chunk& chunk = found->second;
    if (chunk.reserved < chunk.memory.size()) {
      const std::size_t end = std::min(chunk.memory.size(), chunk.reserved + kReserveStep);
      chunk.memory.reserve(chunk.reserved, end);
      chunk.reserved = end;
    }
    if (chunk.reserved < chunk.memory.size()) return Growth::kMore;
    if (!chunk.offered) chunk.offered = messenger.offer(growing_chunk_, chunk.memory.size(), chunk.memory.file());
    return chunk.offered ? Growth::kOffered : Growth::kNone;
  } catch (const std::system_error&) {
    return stop_growing(at);
  } catch (const std::bad_alloc&) {
    return stop_growing(at);
  }
}

/// Creates a chunk for a region of the wanted size; false if there is no room for it.
bool Arena::begin_chunk(Messenger& messenger) {
  const std::size_t wanted = wanted_.load(std::memory_order_relaxed);
  const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
  if (wanted > limit) return false;
  while (size() + wanted > limit) {
    if (!drop_unused(messenger)) return false;
  }
  const std::size_t for_regions = std::min(kRegionsPerChunk * wanted, kMaxForRegions);
  const std::size_t comfortable = std::max({wanted, for_regions, std::clamp(size(), kMinChunk, kMaxChunk)});
  auto share = reserve(whole_pages(std::min<std::size_t>(comfortable, limit - size())), whole_pages(wanted));
  while (!share && drop_unused(messenger)) share = reserve(whole_pages(wanted), whole_pages(wanted));
  if (!share) return false;
  Chunk chunk;
  chunk.memory = SharedMemory::create(share->size());
  chunk.share = std::move(*share);
  total_ += chunk.memory.size();
  growing_chunk_ = next_++;
  chunks_.emplace(growing_chunk_, std::move(chunk));
  return true;
}

/// Takes memory for a chunk from the budget, preferably of the first size, at least of the second.
std::optional<BudgetShare> Arena::reserve(std::size_t comfortable, std::size_t wanted) {
  auto share = BudgetShare::take(budget_, comfortable);
  return share || comfortable == wanted ? std::move(share) : BudgetShare::take(budget_, wanted);
}

/// Releases one unused chunk; false if there is none.
bool Arena::drop_unused(Messenger& messenger) {
  for (auto chunk = chunks_.begin(); chunk != chunks_.end(); ++chunk) {
    if (chunk->second.used > 0 || chunk->first == growing_chunk_ || !messenger.drop(chunk->first)) continue;
    drop(chunk);
    return true;
  }
  return false;
}

/// Stops growing for now, because the system, the peer or the limit does not allow more.
Arena::Growth Arena::stop_growing(Nanos at) {
  if (growing_chunk_ != 0) drop(chunks_.find(growing_chunk_));
  growing_chunk_ = 0;
  wanted_ = 0;
  no_growth_before_ = at + kGrowthPause;
  return Growth::kNone;
}

void Arena::on_answer(std::uint32_t number, bool mapped) {
  MutexLock lock(mutex_);
  if (const auto multicast = multicast_chunks_.find(number); multicast != multicast_chunks_.end()) {
    multicast->second.mapped = mapped && multicast->second.offered;
    return;
  }
  if (number == 0 || number != growing_chunk_) return;
  const auto found = chunks_.find(number);
  if (!found->second.offered) return;
  if (!mapped) {
    stop_growing(now());
    return;
  }
  Chunk& chunk = found->second;
  chunk.mapped = true;
  chunk.idle_since = now();
  free_.add(number, 0, chunk.memory.size());
  growing_chunk_ = 0;
  wanted_ = 0;
}

void Arena::drop(std::map<std::uint32_t, Chunk>::iterator chunk) {
  free_.remove_chunk(chunk->first);
  total_ -= chunk->second.memory.size();
  chunks_.erase(chunk);
}

void Arena::trim(Nanos before, Messenger& messenger) {
  MutexLock lock(mutex_);
  if (!releases_) return;
  process_returns();
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto candidate = chunk++;
    const Chunk& c = candidate->second;
    if (c.mapped && c.used == 0 && c.idle_since < before && messenger.drop(candidate->first)) drop(candidate);
  }
  std::erase_if(multicast_chunks_, [&, arena = multicast_arena_](const auto& chunk) {
    return !arena->has(chunk.first) && messenger.drop(chunk.first);
  });
}

void Arena::close() {
  MutexLock lock(mutex_);
  if (releases_ && !forked_) process_returns();
  releases_ = nullptr;
  if (forked_) return;
  for (auto next = regions_.begin(); next != regions_.end();) {
    const auto current = next++;
    auto& [lease, region] = *current;
    Chunk& chunk = chunks_.at(Lease::chunk(lease));
    region.passed = false;  // the receiver has mapped it and needs nothing of this end any more
    if (region.holders == 0 || !region.leased) {
      chunk.used -= region.size;
      regions_.erase(current);
    } else if (!region.is_private) {
      region.is_private = chunk.memory.make_private(data_of(lease), region.size);
    }
  }
  for (auto next = chunks_.begin(); next != chunks_.end();) {
    const auto current = next++;
    current->second.memory.close_file();
    if (current->second.used == 0) drop(current);
  }
  for (const std::uint64_t lease : std::exchange(multicast_leases_, {})) multicast_arena_->abandon(lease);
}

// ---- multicast memory

bool Arena::announce(const MulticastBuffer& buffer, Messenger& messenger) {
  MutexLock lock(mutex_);
  return announce_locked(buffer, messenger);
}

bool Arena::announce_locked(const MulticastBuffer& buffer, Messenger& messenger) {
  if (!releases_ || limit_.load(std::memory_order_relaxed) == 0) return false;
  if (!multicast_arena_) {
    multicast_arena_ = buffer.multicast_arena();
    multicast_arena_->add_arena(weak_from_this());
  }
  const std::uint32_t number = Lease::chunk(buffer.lease());
  MulticastChunk& chunk = multicast_chunks_[number];
  if (!chunk.offered) {
    const MulticastArena::Offer offer = multicast_arena_->offer(number);
    chunk.offered = messenger.offer(number, offer.size, offer.file);
  }
  return chunk.mapped;
}

std::uint64_t Arena::pass_multicast(const OutSegment& s, Messenger& messenger) {
  const MulticastBuffer& buffer = *s.multicast;
  MutexLock lock(mutex_);
  if (!announce_locked(buffer, messenger)) return 0;
  process_returns();
  if (!releases_ || !has_slot()) return 0;
  if (s.data != buffer.data() || s.size != buffer.size() || !multicast_leases_.insert(buffer.lease()).second) return 0;
  multicast_arena_->add_holder(buffer.lease());
  ++outstanding_;
  return buffer.lease();
}

void Arena::collect() {
  MutexLock lock(mutex_);
  if (releases_ && !forked_) process_returns();
}

// ---- forks

/// Makes leased memory private to this process, unless the receiver has it: then no thread of this process reads it.
void Arena::before_fork() {
  mutex_.lock();
  for (auto& [lease, region] : regions_) {
    if (!is_held_by_program(region) || region.is_private) continue;
    std::byte* data = data_of(lease);
    region.is_private = chunks_.at(Lease::chunk(lease)).memory.make_private(data, region.size);
    if (region.is_private) populate_private_pages(data, region.size);
  }
}

void Arena::after_fork_in_parent() { mutex_.unlock(); }

void Arena::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace telegrad

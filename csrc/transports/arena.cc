#include "transports/arena.h"

#include <algorithm>
#include <bit>
#include <new>
#include <system_error>
#include <utility>

namespace telegrad {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kStep = 8 * kMiB;        // pages of a chunk are reserved in steps of this size
constexpr std::size_t kLeastChunk = 8 * kMiB;  // a chunk is as large as all earlier ones together,
constexpr std::size_t kMostChunk = 64 * kMiB;  // up to this size, unless a region needs more
constexpr std::size_t kWorthALook = kMiB;      // least size of a region for which to wait briefly:
constexpr Nanos kMoment = 30 * kMicrosecond;   // copying it takes longer than this
constexpr Nanos kPause = kSecond;              // before a system or a peer that has refused is asked again

}  // namespace

/// The program's hold on a region, or on a part of it.
class Arena::Holder final : public Block {
 public:
  Holder(const Place& place, std::size_t size, std::shared_ptr<Arena> arena)
      : Block(place.data, size), lease_(place.lease), arena_(std::move(arena)) {}
  ~Holder() override { arena_->let_go(lease_); }
  std::uint64_t lease() const override { return lease_; }

 private:
  const std::uint64_t lease_;
  const std::shared_ptr<Arena> arena_;
};

std::shared_ptr<Arena> Arena::make(Returns* returns) {
  std::shared_ptr<Arena> arena(new Arena(returns));
  watch_forks(arena.get());
  return arena;
}

Arena::~Arena() { unwatch_forks(this); }

// ---- leases

std::optional<Arena::Place> Arena::place(std::size_t size) { return place(size, false); }

std::optional<Arena::Place> Arena::place(std::size_t size, bool lent) {
  if (size > limit_.load(std::memory_order_relaxed)) return std::nullopt;
  std::unique_lock lock(mutex_);
  if (!returns_) return std::nullopt;
  take_back();
  auto place = find(size, lent);
  if (!place && size >= kWorthALook && out_ > 0) {
    // Most often the receiver has just replied and is about to return its leases.
    for (const Nanos until = now() + kMoment; !place && now() < until;) {
      if (take_back()) place = find(size, lent);
    }
  }
  if (!place && has_slot()) {
    wanted_.store(std::max(wanted_.load(std::memory_order_relaxed), region_size(size)), std::memory_order_relaxed);
  }
  return place;
}

/// Requires mutex_.
std::optional<Arena::Place> Arena::find(std::size_t length, bool lent) {
  if (!has_slot()) return std::nullopt;
  const std::size_t size = region_size(length);
  const auto found = free_.take(size);
  if (!found) return std::nullopt;
  const std::uint64_t lease = Lease::of(found->chunk, found->offset);
  regions_.emplace(lease, Region{.size = size, .holders = 1, .lent = lent});
  chunks_.at(found->chunk).used += size;
  return Place{.lease = lease, .data = data_of(lease)};
}

std::optional<Lent> Arena::lend(std::size_t size) {
  const auto found = place(size, true);
  if (!found) return std::nullopt;
  return Lent{.lease = found->lease, .memory = std::make_unique<Holder>(*found, size, shared_from_this())};
}

void Arena::hand_over(std::uint64_t lease) {
  std::lock_guard lock(mutex_);
  Region& region = regions_.at(lease);
  region.holders = 0;
  region.handed_over = true;
  ++out_;
}

std::uint64_t Arena::give(const OutSegment& s) {
  std::lock_guard lock(mutex_);
  const auto found = region_of(s.lease);
  if (!returns_ || found == regions_.end() || out_ >= Returns::kSlots) return 0;
  auto& [lease, region] = *found;
  if (!is_the_programs(region) || region.is_private) return 0;
  const std::byte* data = data_of(lease);
  if (s.data < data || s.data + s.size > data + region.size) return 0;
  const auto begin = static_cast<std::size_t>(s.data - data);
  if (begin % kAlignment != 0) return 0;
  region.handed_over = true;
  ++out_;
  return Lease::of(Lease::chunk(lease), Lease::offset(lease) + begin);
}

BlockPtr Arena::come_home(std::uint64_t lease, std::size_t size) {
  std::lock_guard lock(mutex_);
  const auto found = region_of(lease);
  if (!returns_ || found == regions_.end()) return nullptr;
  auto& [first, region] = *found;
  const std::size_t begin = Lease::offset(lease) - Lease::offset(first);
  if (!region.handed_over || size > region.size - begin) return nullptr;
  auto home = std::make_unique<Holder>(Place{.lease = first, .data = data_of(first) + begin}, size, shared_from_this());
  region.handed_over = false;
  region.lent = true;
  ++region.holders;  // the message that carried it may still hold it
  --out_;
  return home;
}

/// Requires mutex_. Returns the region that contains a lease.
Arena::Regions::iterator Arena::region_of(std::uint64_t lease) {
  const auto next = regions_.upper_bound(lease);
  if (next == regions_.begin()) return regions_.end();
  const auto region = std::prev(next);
  const bool within = Lease::chunk(lease) == Lease::chunk(region->first) &&
                      Lease::offset(lease) - Lease::offset(region->first) < region->second.size;
  return within ? region : regions_.end();
}

/// Requires mutex_.
std::byte* Arena::data_of(std::uint64_t lease) {
  return chunks_.at(Lease::chunk(lease)).memory.data() + Lease::offset(lease);
}

void Arena::let_go(std::uint64_t lease) {
  std::lock_guard lock(mutex_);
  const auto region = regions_.find(lease);
  --region->second.holders;
  if (!forked_) free_if_unused(region);
}

/// Requires mutex_. Processes returned leases; returns whether there were any.
bool Arena::take_back() {
  const std::uint64_t given = returns_->given.load(std::memory_order_acquire);
  if (given == taken_) return false;
  bool sound = given - taken_ <= out_;
  for (; sound && taken_ != given; ++taken_) {
    const std::uint64_t lease = returns_->leases[taken_ % Returns::kSlots].load(std::memory_order_relaxed);
    sound = take_back(lease);
  }
  returns_->taken.store(taken_, std::memory_order_release);
  if (!sound) {
    spoiled_ = true;
    returns_ = nullptr;
  }
  return sound;
}

/// Requires mutex_. Processes one returned lease; false if the receiver does not have it.
bool Arena::take_back(std::uint64_t lease) {
  if (Lease::is_common(lease)) {
    if (shared_.erase(lease) == 0) return false;
    commons_->let_go(lease);
  } else {
    const auto region = region_of(lease);
    if (region == regions_.end() || !region->second.handed_over) return false;
    region->second.handed_over = false;
    free_if_unused(region);
  }
  --out_;
  return true;
}

/// Requires mutex_.
void Arena::free_if_unused(Regions::iterator region) {
  const auto& [lease, r] = *region;
  if (r.holders > 0 || r.handed_over) return;
  if (returns_ && r.is_private && !chunks_.at(Lease::chunk(lease)).memory.make_shared(data_of(lease), r.size)) return;
  const std::uint32_t number = Lease::chunk(lease);
  const auto found = chunks_.find(number);
  Chunk& chunk = found->second;
  chunk.used -= r.size;
  if (chunk.used == 0) chunk.idle_since = now();
  if (returns_) free_.add(number, Lease::offset(lease), r.size);
  regions_.erase(region);
  if (!returns_ && chunk.used == 0) drop(found);
}

// ---- chunks

Arena::Growth Arena::grow(Messenger& messenger) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return Growth::kGoesOn;
  if (!returns_ || wanted_.load(std::memory_order_relaxed) == 0) return Growth::kNone;
  const Nanos at = now();
  if (at < no_growth_before_) return Growth::kNone;
  try {
    if (growing_ == 0 && !begin_chunk(messenger)) return give_up_growing(at);
    const auto found = chunks_.find(growing_);
    Chunk& chunk = found->second;
    if (chunk.reserved < chunk.memory.size()) {
      const std::size_t end = std::min(chunk.memory.size(), chunk.reserved + kStep);
      chunk.memory.reserve(chunk.reserved, end);
      chunk.reserved = end;
    }
    if (chunk.reserved < chunk.memory.size()) return Growth::kGoesOn;
    if (!chunk.offered) chunk.offered = messenger.offer(growing_, chunk.memory.size(), chunk.memory.file());
    return chunk.offered ? Growth::kOffered : Growth::kNone;
  } catch (const std::system_error&) {
    return give_up_growing(at);
  } catch (const std::bad_alloc&) {
    return give_up_growing(at);
  }
}

/// Requires mutex_. Creates a chunk for a region of the wanted size; false if there is no room for it.
bool Arena::begin_chunk(Messenger& messenger) {
  const std::size_t wanted = wanted_.load(std::memory_order_relaxed);
  const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
  if (wanted > limit) return false;
  for (auto chunk = chunks_.begin(); chunk != chunks_.end() && size() + wanted > limit;) {
    const auto unused = chunk++;
    if (unused->second.used == 0 && messenger.drop(unused->first)) drop(unused);
  }
  if (size() + wanted > limit) return false;
  const std::size_t comfortable = std::max(wanted, std::clamp(size(), kLeastChunk, kMostChunk));
  Chunk chunk;
  chunk.memory = SharedMemory::create(whole_pages(std::min<std::size_t>(comfortable, limit - size())));
  total_ += chunk.memory.size();
  growing_ = next_++;
  chunks_.emplace(growing_, std::move(chunk));
  return true;
}

/// Requires mutex_. Stops growing for now, because the system, the peer or the limit does not allow more.
Arena::Growth Arena::give_up_growing(Nanos at) {
  if (growing_ != 0) drop(chunks_.find(growing_));
  growing_ = 0;
  wanted_ = 0;
  no_growth_before_ = at + kPause;
  return Growth::kNone;
}

void Arena::on_answer(std::uint32_t number, bool mapped) {
  std::lock_guard lock(mutex_);
  if (const auto common = common_chunks_.find(number); common != common_chunks_.end()) {
    common->second.mapped = mapped && common->second.offered;
    return;
  }
  if (number == 0 || number != growing_) return;
  const auto found = chunks_.find(number);
  if (!found->second.offered) return;
  if (!mapped) {
    give_up_growing(now());
    return;
  }
  Chunk& chunk = found->second;
  chunk.mapped = true;
  chunk.idle_since = now();
  free_.add(number, 0, chunk.memory.size());
  growing_ = 0;
  wanted_ = 0;
}

/// Requires mutex_.
void Arena::drop(std::map<std::uint32_t, Chunk>::iterator chunk) {
  free_.forget(chunk->first);
  total_ -= chunk->second.memory.size();
  chunks_.erase(chunk);
}

void Arena::trim(Nanos before, Messenger& messenger) {
  std::lock_guard lock(mutex_);
  if (!returns_) return;
  take_back();
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto looked_at = chunk++;
    const Chunk& c = looked_at->second;
    if (c.mapped && c.used == 0 && c.idle_since < before && messenger.drop(looked_at->first)) drop(looked_at);
  }
  std::erase_if(common_chunks_,
                [&](const auto& chunk) { return !commons_->has(chunk.first) && messenger.drop(chunk.first); });
}

void Arena::close() {
  std::lock_guard lock(mutex_);
  if (returns_ && !forked_) take_back();
  returns_ = nullptr;
  if (forked_) return;
  for (auto next = regions_.begin(); next != regions_.end();) {
    const auto here = next++;
    auto& [lease, region] = *here;
    Chunk& chunk = chunks_.at(Lease::chunk(lease));
    region.handed_over = false;  // the receiver has mapped it and needs nothing of this end any more
    if (region.holders == 0 || !region.lent) {
      chunk.used -= region.size;
      regions_.erase(here);
    } else if (!region.is_private) {
      region.is_private = chunk.memory.make_private(data_of(lease), region.size);
    }
  }
  for (auto next = chunks_.begin(); next != chunks_.end();) {
    const auto here = next++;
    here->second.memory.close_file();
    if (here->second.used == 0) drop(here);
  }
  for (const std::uint64_t lease : std::exchange(shared_, {})) commons_->give_up(lease);
}

// ---- multicast memory

bool Arena::introduce(const Common& piece, Messenger& messenger) {
  std::lock_guard lock(mutex_);
  return introduce_locked(piece, messenger);
}

bool Arena::introduce_locked(const Common& piece, Messenger& messenger) {
  if (!returns_ || limit_.load(std::memory_order_relaxed) == 0) return false;
  if (!commons_) {
    commons_ = piece.commons();
    commons_->join(weak_from_this());
  }
  const std::uint32_t number = Lease::chunk(piece.lease());
  CommonChunk& chunk = common_chunks_[number];
  if (!chunk.offered) {
    const Commons::Offer offer = commons_->offer(number);
    chunk.offered = messenger.offer(number, offer.size, offer.file);
  }
  return chunk.mapped;
}

std::uint64_t Arena::share(const OutSegment& s, Messenger& messenger) {
  const Common& piece = *s.common;
  std::lock_guard lock(mutex_);
  if (!introduce_locked(piece, messenger)) return 0;
  take_back();
  if (!returns_ || !has_slot()) return 0;
  if (s.data != piece.data() || s.size != piece.size() || !shared_.insert(piece.lease()).second) return 0;
  commons_->hold(piece.lease());
  ++out_;
  return piece.lease();
}

void Arena::collect() {
  std::lock_guard lock(mutex_);
  if (returns_ && !forked_) take_back();
}

// ---- forks

/// Makes leased memory private to this process, unless the receiver has it: then no thread of this process reads it.
void Arena::before_fork() {
  mutex_.lock();
  for (auto& [lease, region] : regions_) {
    if (!is_the_programs(region) || region.is_private) continue;
    std::byte* data = data_of(lease);
    region.is_private = chunks_.at(Lease::chunk(lease)).memory.make_private(data, region.size);
    if (region.is_private) own_pages(data, region.size);
  }
}

void Arena::after_fork_in_parent() { mutex_.unlock(); }

void Arena::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace telegrad

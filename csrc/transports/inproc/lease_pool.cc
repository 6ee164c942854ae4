#include "transports/inproc/lease_pool.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "base/fork_handlers.h"

namespace telegrad {
namespace {

constexpr std::size_t kMaxLeased = 16 << 20;  // bytes that one link leases at most

/// Mutex of all pools. Forks hold it.
std::mutex& pools_mutex() {
  static auto* m = new std::mutex;  // never destroyed
  return *m;
}

[[maybe_unused]] const bool registered = lock_at_fork(pools_mutex());

}  // namespace

class LeasePool::Holder final : public Block {
 public:
  Holder(std::byte* data, std::size_t size, std::uint64_t lease, std::shared_ptr<LeasePool> leases)
      : Block(data, size), lease_(lease), pool_(std::move(leases)) {}
  ~Holder() override { pool_->release(lease_); }

 private:
  const std::uint64_t lease_;
  const std::shared_ptr<LeasePool> pool_;
};

std::optional<LinkLease> LeasePool::lease(std::size_t size) {
  std::lock_guard lock(pools_mutex());
  if (size > kMaxLeased - leased_) return std::nullopt;
  const std::size_t rounded = (std::max(size, kAlignment) + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (!memory) return std::nullopt;
  const std::uint64_t lease = next_++;
  regions_.emplace(lease, Region{.memory = memory, .size = size, .holders = 0});
  leased_ += size;
  return LinkLease{.lease = lease, .memory = hold(lease, 0, size)};
}

BlockPtr LeasePool::pass(const OutSegment& s) {
  std::lock_guard lock(pools_mutex());
  const auto found = s.lease ? regions_.find(s.lease) : regions_.end();
  if (found == regions_.end() || found->second.holders != 1) return nullptr;
  std::byte* memory = found->second.memory;
  if (s.data < memory || s.data + s.size > memory + found->second.size) return nullptr;
  const auto begin = static_cast<std::size_t>(s.data - memory);
  return begin % kAlignment == 0 ? hold(s.lease, begin, s.size) : nullptr;
}

BlockPtr LeasePool::hold(std::uint64_t lease, std::size_t begin, std::size_t size) {
  Region& region = regions_.at(lease);
  auto block = std::make_unique<Holder>(region.memory + begin, size, lease, shared_from_this());
  ++region.holders;
  return block;
}

void LeasePool::release(std::uint64_t lease) {
  std::lock_guard lock(pools_mutex());
  const auto found = regions_.find(lease);
  if (--found->second.holders > 0) return;
  leased_ -= found->second.size;
  std::free(found->second.memory);
  regions_.erase(found);
}

}  // namespace telegrad

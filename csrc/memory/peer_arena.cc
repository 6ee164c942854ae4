#include "memory/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

namespace telegrad {
namespace {

constexpr int kCopiesAfterWrite = 15;  // multicast regions to copy before the next attempt to map one

// Flags of a page in the kernel's pagemap: of a file, not private to this process; in memory or swapped out.
constexpr std::uint64_t kFilePage = std::uint64_t{1} << 61, kPresentPage = std::uint64_t{3} << 62;

/// Returns null if there is no memory for the copy.
BlockPtr copy_of(const std::byte* data, std::size_t size, BlockSource& blocks) {
  try {
    BlockPtr bytes = blocks.allocate(size);
    std::memcpy(bytes->data(), data, size);
    return bytes;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

class PeerArena::MappedRegion final : public Block {
 public:
  MappedRegion(std::byte* data, std::size_t size, std::uint64_t lease, std::shared_ptr<Chunk> chunk, bool is_private,
               std::shared_ptr<PeerArena> arena)
      : Block(data, size),
        mapped_lease(lease),
        chunk(std::move(chunk)),
        is_private(is_private),
        arena_(std::move(arena)) {}
  ~MappedRegion() override { arena_->release(*this); }
  std::uint64_t lease() const override {
    return Lease::is_multicast(mapped_lease) ? 0 : Lease::kReturned | mapped_lease;
  }

  /// Returns the whole pages of the region, which contain nothing else of this process.
  std::byte* pages() const { return data() - std::size_t{reinterpret_cast<std::uintptr_t>(data()) % kPage}; }
  std::size_t pages_size() const {
    return std::max(whole_pages(static_cast<std::size_t>(data() + size() - pages())), kPage);
  }

  const std::uint64_t mapped_lease;
  const std::shared_ptr<Chunk> chunk;
  bool is_private;           // its pages are private, or become so when written to
  bool is_stuck = false;     // it cannot be shared again, so its lease is never returned
  bool is_returned = false;  // it was returned with a message, so its lease is not this process's to return

 private:
  const std::shared_ptr<PeerArena> arena_;
};

std::shared_ptr<PeerArena> PeerArena::make(std::shared_ptr<SharedMemory> memory, ReleaseQueue* releases) {
  std::shared_ptr<PeerArena> arena(new PeerArena(std::move(memory), releases));
  register_fork_handler(arena.get(), ForkLevel::kArena);
  return arena;
}

PeerArena::~PeerArena() { unregister_fork_handler(this, ForkLevel::kArena); }

bool PeerArena::map(std::uint32_t number, std::size_t size, UniqueFd file) {
  if (!file || size % kPage != 0 || size > limit_ || mapped_ > limit_ - size || chunks_.contains(number)) return false;
  try {
    auto chunk = std::make_shared<Chunk>();
    chunk->memory = SharedMemory::map_file(std::move(file), size, number >= kMulticastChunks);
    chunks_.emplace(number, std::move(chunk));
    mapped_ += size;
    return true;
  } catch (const std::exception&) {  // no memory, no address space, or an invalid file
    return false;
  }
}

void PeerArena::unmap(std::uint32_t number) {
  const auto found = chunks_.find(number);
  if (found == chunks_.end()) return;
  mapped_ -= found->second->memory.size();
  chunks_.erase(found);  // blocks keep the chunk alive
}

BlockPtr PeerArena::map_segment(std::uint64_t lease, std::size_t size, BlockSource& blocks) {
  const auto found = chunks_.find(Lease::chunk(lease));
  if (found == chunks_.end()) return nullptr;
  Chunk& chunk = *found->second;
  const std::size_t chunk_size = chunk.memory.size(), offset = Lease::offset(lease);
  if (offset >= chunk_size || size > chunk_size - offset) return nullptr;
  const bool is_multicast = Lease::is_multicast(lease);
  std::byte* data = chunk.memory.data() + offset;
  if (is_multicast && should_copy()) {
    if (BlockPtr bytes = copy_of(data, size, blocks)) {
      MutexLock lock(mutex_);
      return_lease(lease);
      return bytes;
    }
  }
  auto block = std::make_unique<MappedRegion>(data, size, lease, found->second, is_multicast, shared_from_this());
  {
    MutexLock lock(mutex_);
    regions_.emplace(block->data(), block.get());
  }
  return blocks.adopt(std::move(block));
}

/// Returns whether this receiver is likely to write to its tensors.
bool PeerArena::should_copy() {
  MutexLock lock(mutex_);
  return copies_left_ > 0 && copies_left_-- > 0;
}

std::uint64_t PeerArena::return_zero_copy(const OutSegment& s) {
  MutexLock lock(mutex_);
  const auto next = regions_.lower_bound({s.data + 1, nullptr});
  if (next == regions_.begin() || closed_ || forked_) return 0;
  const auto found = std::prev(next);
  MappedRegion& region = *found->second;
  const auto begin = static_cast<std::size_t>(s.data - region.data());
  if (s.lease != region.lease() || begin > region.size() || s.size > region.size() - begin) return 0;
  if (region.is_private || region.is_stuck || begin % kAlignment != 0) return 0;
  region.is_returned = true;
  regions_.erase(found);
  const std::uint64_t lease = region.mapped_lease;
  return Lease::kReturned | Lease::of(Lease::chunk(lease), Lease::offset(lease) + begin);
}

void PeerArena::release(MappedRegion& region) {
  MutexLock lock(mutex_);
  if (region.is_returned) return;
  regions_.erase({region.data(), &region});
  if (region.is_private && !drop_private_pages(region)) return;
  if (forked_ || closed_ || region.is_stuck) return;
  if (region.is_private && !Lease::is_multicast(region.mapped_lease)) {  // since a fork
    if (!region.chunk->memory.make_shared(region.pages(), region.pages_size())) return;
  }
  return_lease(region.mapped_lease);
}

/// Makes a private region show its shared memory again. Returns false if this is impossible.
bool PeerArena::drop_private_pages(MappedRegion& region) {
  const std::size_t private_pages = count_private_pages(region);
  if (Lease::is_multicast(region.mapped_lease) && private_pages * kPage > region.pages_size() / 2)
    copies_left_ = kCopiesAfterWrite;
  return private_pages == 0 || ::madvise(region.pages(), region.pages_size(), MADV_DONTNEED) == 0;
}

/// Returns how many pages have been written to; at least one if this is unknown.
std::size_t PeerArena::count_private_pages(const MappedRegion& region) {
  if (forked_ || closed_) return 1;
  if (!pagemap_) pagemap_ = UniqueFd(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::uint64_t entries[512];
  std::size_t private_pages = 0;
  auto page = reinterpret_cast<std::uintptr_t>(region.pages()) / kPage;
  for (const auto end = page + region.pages_size() / kPage; page < end;) {
    const std::size_t count = std::min<std::size_t>(end - page, std::size(entries));
    const std::size_t size = count * sizeof entries[0];
    const ssize_t read = ::pread(pagemap_.get(), entries, size, static_cast<off_t>(page * sizeof entries[0]));
    if (read != static_cast<ssize_t>(size)) return 1;
    private_pages += static_cast<std::size_t>(std::count_if(
        entries, entries + count, [](auto entry) { return (entry & kPresentPage) && !(entry & kFilePage); }));
    page += count;
  }
  return private_pages;
}

/// There is a slot for every lease that this end may have.
void PeerArena::return_lease(std::uint64_t lease) {
  const std::uint64_t returned = releases_->returned.load(std::memory_order_relaxed);
  releases_->leases[returned % ReleaseQueue::kSlots].store(lease, std::memory_order_relaxed);
  releases_->returned.store(returned + 1, std::memory_order_release);
}

/// Makes a region copy-on-write, so that no other process sees this one's writes.
void PeerArena::make_private(MappedRegion& region) {
  if (region.is_private || region.is_stuck) return;
  region.is_private = region.chunk->memory.make_private(region.pages(), region.pages_size());
  region.is_stuck = !region.is_private;  // parent and child share it: at least no other tensor may use it
}

void PeerArena::close() {
  MutexLock lock(mutex_);
  closed_ = true;
  for (const auto& [begin, region] : regions_) make_private(*region);
  for (const auto& [begin, region] : regions_) region->chunk->memory.close_file();  // a chunk may have several regions
  chunks_.clear();
  pagemap_ = UniqueFd();
}

// ---- forks

void PeerArena::before_fork() {
  mutex_.lock();
  if (closed_) return;  // no process changes this memory any more: copy-on-write keeps parent and child apart
  for (const auto& [begin, region] : regions_) {
    make_private(*region);
    if (region->is_private) populate_private_pages(region->pages(), region->pages_size());
  }
}

void PeerArena::after_fork_in_parent() { mutex_.unlock(); }

/// The parent returns the leases.
void PeerArena::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace telegrad

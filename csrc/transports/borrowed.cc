#include "transports/borrowed.h"

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

constexpr int kCopies = 15;  // multicast regions to copy before the next attempt to map one

// Flags of a page in the kernel's pagemap: of a file, not private to this process; in memory or swapped out.
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61, kThere = std::uint64_t{3} << 62;

/// Returns null if there is no memory for the copy.
BlockPtr copy_of(const std::byte* data, std::size_t size, Inbox& inbox) {
  try {
    BlockPtr bytes = inbox.allocate(size);
    std::memcpy(bytes->data(), data, size);
    return bytes;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

class Borrower::Borrowed final : public Block {
 public:
  Borrowed(std::byte* data, std::size_t size, std::uint64_t lease, std::shared_ptr<Chunk> chunk, bool is_private,
           std::shared_ptr<Borrower> borrower)
      : Block(data, size),
        taken_under(lease),
        chunk(std::move(chunk)),
        is_private(is_private),
        borrower_(std::move(borrower)) {}
  ~Borrowed() override { borrower_->let_go(*this); }
  std::uint64_t lease() const override { return Lease::is_common(taken_under) ? 0 : Lease::kHome | taken_under; }

  /// Returns the whole pages of the region, which contain nothing else of this process.
  std::byte* pages() const { return data() - std::size_t{reinterpret_cast<std::uintptr_t>(data()) % kPage}; }
  std::size_t pages_size() const {
    return std::max(whole_pages(static_cast<std::size_t>(data() + size() - pages())), kPage);
  }

  const std::uint64_t taken_under;
  const std::shared_ptr<Chunk> chunk;
  bool is_private;        // its pages are private, or become so when written to
  bool is_stuck = false;  // it cannot be shared again, so its lease is never returned
  bool is_home = false;   // it was returned with a message, so its lease is not this process's to return

 private:
  const std::shared_ptr<Borrower> borrower_;
};

std::shared_ptr<Borrower> Borrower::make(std::shared_ptr<SharedMemory> memory, Returns* returns) {
  std::shared_ptr<Borrower> borrower(new Borrower(std::move(memory), returns));
  watch_forks(borrower.get());
  return borrower;
}

Borrower::~Borrower() { unwatch_forks(this); }

bool Borrower::map(std::uint32_t number, std::size_t size, Descriptor file) {
  if (!file || size % kPage != 0 || size > limit_ || mapped_ > limit_ - size || chunks_.contains(number)) return false;
  try {
    auto chunk = std::make_shared<Chunk>();
    chunk->memory = SharedMemory::adopt(std::move(file), size, number >= kCommonChunks);
    chunks_.emplace(number, std::move(chunk));
    mapped_ += size;
    return true;
  } catch (const std::exception&) {  // no memory, no address space, or an invalid file
    return false;
  }
}

void Borrower::unmap(std::uint32_t number) {
  const auto found = chunks_.find(number);
  if (found == chunks_.end()) return;
  mapped_ -= found->second->memory.size();
  chunks_.erase(found);  // blocks keep the chunk alive
}

BlockPtr Borrower::borrow(const SegmentHeader& s, Inbox& inbox) {
  const auto found = chunks_.find(Lease::chunk(s.lease));
  if (found == chunks_.end()) return nullptr;
  Chunk& chunk = *found->second;
  const std::size_t size = chunk.memory.size(), offset = Lease::offset(s.lease);
  if (offset >= size || s.size > size - offset) return nullptr;
  const bool is_common = Lease::is_common(s.lease);
  std::byte* data = chunk.memory.data() + offset;
  if (is_common && is_to_be_copied()) {
    if (BlockPtr bytes = copy_of(data, s.size, inbox)) {
      std::lock_guard lock(mutex_);
      give_back(s.lease);
      return bytes;
    }
  }
  auto block = std::make_unique<Borrowed>(data, s.size, s.lease, found->second, is_common, shared_from_this());
  std::unique_lock lock(mutex_);
  regions_.emplace(block->data(), block.get());
  lock.unlock();
  return inbox.take_over(std::move(block));
}

/// Returns whether this receiver is likely to write to its tensors.
bool Borrower::is_to_be_copied() {
  std::lock_guard lock(mutex_);
  return to_copy_ > 0 && to_copy_-- > 0;
}

std::uint64_t Borrower::send_home(const OutSegment& s) {
  std::lock_guard lock(mutex_);
  const auto next = regions_.lower_bound({s.data + 1, nullptr});
  if (next == regions_.begin() || closed_ || forked_) return 0;
  const auto found = std::prev(next);
  Borrowed& region = *found->second;
  const auto begin = static_cast<std::size_t>(s.data - region.data());
  if (s.lease != region.lease() || begin > region.size() || s.size > region.size() - begin) return 0;
  if (region.is_private || region.is_stuck || begin % kAlignment != 0) return 0;
  region.is_home = true;
  regions_.erase(found);
  const std::uint64_t lease = region.taken_under;
  return Lease::kHome | Lease::of(Lease::chunk(lease), Lease::offset(lease) + begin);
}

void Borrower::let_go(Borrowed& region) {
  std::lock_guard lock(mutex_);
  if (region.is_home) return;
  regions_.erase({region.data(), &region});
  if (region.is_private && !drop_own_pages(region)) return;
  if (forked_ || closed_ || region.is_stuck) return;
  if (region.is_private && !Lease::is_common(region.taken_under)) {  // since a fork
    if (!region.chunk->memory.make_shared(region.pages(), region.pages_size())) return;
  }
  give_back(region.taken_under);
}

/// Requires mutex_. Makes a private region show its shared memory again. Returns false if this is impossible.
bool Borrower::drop_own_pages(Borrowed& region) {
  const std::size_t own = count_own_pages(region);
  if (Lease::is_common(region.taken_under) && own * kPage > region.pages_size() / 2) to_copy_ = kCopies;
  return own == 0 || ::madvise(region.pages(), region.pages_size(), MADV_DONTNEED) == 0;
}

/// Requires mutex_. Returns how many pages have been written to; at least one if this is unknown.
std::size_t Borrower::count_own_pages(const Borrowed& region) {
  if (forked_ || closed_) return 1;
  if (!pagemap_) pagemap_ = Descriptor(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::uint64_t entries[512];
  std::size_t own = 0;
  auto page = reinterpret_cast<std::uintptr_t>(region.pages()) / kPage;
  for (const auto end = page + region.pages_size() / kPage; page < end;) {
    const std::size_t count = std::min<std::size_t>(end - page, std::size(entries));
    const std::size_t size = count * sizeof entries[0];
    const ssize_t read = ::pread(pagemap_.get(), entries, size, static_cast<off_t>(page * sizeof entries[0]));
    if (read != static_cast<ssize_t>(size)) return 1;
    own += static_cast<std::size_t>(
        std::count_if(entries, entries + count, [](auto entry) { return (entry & kThere) && !(entry & kOfFile); }));
    page += count;
  }
  return own;
}

/// Requires mutex_. There is a slot for every lease that this end may have.
void Borrower::give_back(std::uint64_t lease) {
  const std::uint64_t given = returns_->given.load(std::memory_order_relaxed);
  returns_->leases[given % Returns::kSlots].store(lease, std::memory_order_relaxed);
  returns_->given.store(given + 1, std::memory_order_release);
}

/// Requires mutex_. Makes a region copy-on-write, so that no other process sees this one's writes.
void Borrower::make_private(Borrowed& region) {
  if (region.is_private || region.is_stuck) return;
  region.is_private = region.chunk->memory.make_private(region.pages(), region.pages_size());
  region.is_stuck = !region.is_private;  // parent and child share it: at least no other tensor may use it
}

void Borrower::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& [begin, region] : regions_) {
    make_private(*region);
    region->chunk->memory.close_file();
  }
  chunks_.clear();
  pagemap_ = Descriptor();
}

// ---- forks

void Borrower::before_fork() {
  mutex_.lock();
  if (closed_) return;  // no process changes this memory any more: copy-on-write keeps parent and child apart
  for (const auto& [begin, region] : regions_) {
    make_private(*region);
    if (region->is_private) own_pages(region->pages(), region->pages_size());
  }
}

void Borrower::after_fork_in_parent() { mutex_.unlock(); }

/// The parent returns the leases.
void Borrower::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace telegrad

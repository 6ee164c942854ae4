#include "transports/borrowed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace telegrad {
class Borrower::Borrowed final : public Block {
 public:
  Borrowed(std::byte* data, std::size_t size, std::uint64_t lease, std::shared_ptr<Chunk> chunk, bool is_private,
           std::shared_ptr<Borrower> borrower)
      : Block(data, size),
        lease(lease),
        chunk(std::move(chunk)),
        is_private(is_private),
        borrower_(std::move(borrower)) {}
  ~Borrowed() override { borrower_->let_go(*this); }

  /// The whole pages that it lies in, which have nothing else of this process's.
  std::byte* pages() const { return data() - std::size_t{reinterpret_cast<std::uintptr_t>(data()) % kPage}; }
  std::size_t pages_size() const {
    return std::max(whole_pages(static_cast<std::size_t>(data() + size() - pages())), kPage);
  }

  const std::uint64_t lease;
  const std::shared_ptr<Chunk> chunk;
  bool is_private;        // its pages are, or will be when written to
  bool is_stuck = false;  // it cannot be made what it was, so the lease stays here

 private:
  const std::shared_ptr<Borrower> borrower_;
};

Borrower::Chunk::~Chunk() {
  if (view) ::munmap(view, memory.size());
}

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
    chunk->memory = SharedMemory::adopt(std::move(file), size);
    chunks_.emplace(number, std::move(chunk));
    mapped_ += size;
    return true;
  } catch (const std::exception&) {  // no memory, no address space, or not what it should be
    return false;
  }
}

void Borrower::unmap(std::uint32_t number) {
  const auto found = chunks_.find(number);
  if (found == chunks_.end()) return;
  mapped_ -= found->second->memory.size();
  chunks_.erase(found);  // blocks keep it
}

BlockPtr Borrower::borrow(const SegmentHeader& s, Inbox& inbox) {
  const auto found = chunks_.find(Lease::chunk(s.lease));
  if (found == chunks_.end()) return nullptr;
  Chunk& chunk = *found->second;
  const std::size_t size = chunk.memory.size(), offset = Lease::offset(s.lease);
  if (offset >= size || s.size > size - offset) return nullptr;
  const bool is_private = s.lease & Lease::kHeld;
  if (is_private && !chunk.view) {
    void* view = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, chunk.memory.file(), 0);
    if (view == MAP_FAILED) {
      BlockPtr copy = inbox.allocate(s.size);
      if (s.size > 0) std::memcpy(copy->data(), chunk.memory.data() + offset, s.size);
      std::lock_guard lock(mutex_);
      give_back(s.lease);
      return copy;
    }
    chunk.view = static_cast<std::byte*>(view);
  }
  std::byte* data = (is_private ? chunk.view : chunk.memory.data()) + offset;
  auto block = std::make_unique<Borrowed>(data, s.size, s.lease, found->second, is_private, shared_from_this());
  std::unique_lock lock(mutex_);
  regions_.insert(block.get());
  lock.unlock();
  return inbox.take_over(std::move(block));
}

void Borrower::let_go(Borrowed& region) {
  std::lock_guard lock(mutex_);
  regions_.erase(&region);
  if (region.is_private && ::madvise(region.pages(), region.pages_size(), MADV_DONTNEED) != 0) return;
  if (forked_ || closed_ || region.is_stuck) return;
  const bool was_shared = !(region.lease & Lease::kHeld);
  if (region.is_private && was_shared) {  // since a fork
    if (!region.chunk->memory.make_shared(region.pages(), region.pages_size())) return;
  }
  give_back(region.lease);
}

/// With the mutex held. There is a slot for every lease that can be here.
void Borrower::give_back(std::uint64_t lease) {
  const std::uint64_t given = returns_->given.load(std::memory_order_relaxed);
  returns_->leases[given % Returns::kSlots].store(lease, std::memory_order_relaxed);
  returns_->given.store(given + 1, std::memory_order_release);
}

/// With the mutex held: from now on what this process writes to a region is seen by nobody else.
void Borrower::make_private(Borrowed& region) {
  if (region.is_private || region.is_stuck) return;
  region.is_private = region.chunk->memory.make_private(region.pages(), region.pages_size());
  region.is_stuck = !region.is_private;  // a child would share it: the least is that nobody else gets it
}

void Borrower::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (Borrowed* region : regions_) {
    make_private(*region);
    region->chunk->memory.close_file();
  }
  chunks_.clear();
}

// ---- forks

void Borrower::before_fork() {
  mutex_.lock();
  if (closed_) return;  // nobody changes what these regions lie in any more: the kernel keeps processes apart
  for (Borrowed* region : regions_) {
    make_private(*region);
    if (region->is_private) own_pages(region->pages(), region->pages_size());
  }
}

void Borrower::after_fork_in_parent() { mutex_.unlock(); }

/// The leases are the parent's to give back.
void Borrower::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace telegrad

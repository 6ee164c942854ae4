// Budget of the memory that a worker keeps in arenas and caches, with all peers together. It admits less than each of
// them may have alone: many workers on one host share memory with each other. The workers of one process count
// together, and each has its own limit of the sum.
//
// What gets no memory falls back: bytes go through the ring, received memory is not cached. So a refusal is no error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace telegrad {

/// Bytes that budgets have taken together.
struct MemoryUse {
  std::atomic<std::uint64_t> used = 0;
  std::atomic<std::uint64_t> shortages = 0;  // how often one of them had none left

  /// Returns the one of this process.
  static MemoryUse& of_process() { return *process_.load(std::memory_order_acquire); }
  /// Begins again, in a forked process: its workers have nothing of what the parent's use. The old one, which the
  /// parent's objects refer to, is never destroyed.
  static void after_fork() {
    auto* const use = new MemoryUse;
    use->of_parent_ = process_.load(std::memory_order_acquire);
    process_.store(use, std::memory_order_release);
  }

 private:
  MemoryUse* of_parent_ = nullptr;
  static std::atomic<MemoryUse*> process_;
};

/// Thread-safe, without locks.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::uint64_t limit, MemoryUse& use = MemoryUse::of_process()) : limit_(limit), use_(use) {}

  /// Takes `size` bytes. Returns false if that many are not left.
  bool reserve(std::uint64_t size) {
    std::uint64_t used = use_.used.load(std::memory_order_relaxed);
    do {
      if (size > limit_ || used > limit_ - size) {
        refused_.fetch_add(1, std::memory_order_relaxed);
        use_.shortages.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
    } while (!use_.used.compare_exchange_weak(used, used + size, std::memory_order_relaxed));
    return true;
  }
  void release(std::uint64_t size) { use_.used.fetch_sub(size, std::memory_order_relaxed); }

  /// Returns whether memory was refused since the last call, to any of the workers: what is unused should be given
  /// back.
  bool take_short() {
    const std::uint64_t now = use_.shortages.load(std::memory_order_relaxed);
    return shortages_.exchange(now, std::memory_order_relaxed) != now;
  }

  /// Returns what all workers of the process use.
  std::uint64_t used() const { return use_.used.load(std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_; }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const std::uint64_t limit_;
  MemoryUse& use_;
  std::atomic<std::uint64_t> refused_ = 0;
  std::atomic<std::uint64_t> shortages_ = use_.shortages.load(std::memory_order_relaxed);  // at the last `take_short`
};

/// Bytes taken from a budget, which are given back with this object.
class BudgetShare {
 public:
  BudgetShare() = default;
  BudgetShare(BudgetShare&& other) noexcept { *this = std::move(other); }
  BudgetShare& operator=(BudgetShare&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~BudgetShare() {
    if (budget_) budget_->release(size_);
  }

  /// Takes bytes from a budget (null: without limit); nothing if they are not left.
  static std::optional<BudgetShare> take(const std::shared_ptr<MemoryBudget>& budget, std::uint64_t size) {
    if (budget && !budget->reserve(size)) return std::nullopt;
    BudgetShare share;
    share.budget_ = budget;
    share.size_ = size;
    return share;
  }

  std::uint64_t size() const { return size_; }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  std::uint64_t size_ = 0;
};

}  // namespace telegrad

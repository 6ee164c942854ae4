// Budget of the memory that a worker keeps in arenas and caches, with all peers together. It admits less than each of
// them may have alone: many workers on one host share memory with each other.
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

/// Thread-safe, without locks.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::uint64_t limit) : limit_(limit) {}

  /// Takes `size` bytes. Returns false if that many are not left.
  bool reserve(std::uint64_t size) {
    std::uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (size > limit_ || used > limit_ - size) {
        refused_.fetch_add(1, std::memory_order_relaxed);
        is_short_.store(true, std::memory_order_relaxed);
        return false;
      }
    } while (!used_.compare_exchange_weak(used, used + size, std::memory_order_relaxed));
    return true;
  }
  void release(std::uint64_t size) { used_.fetch_sub(size, std::memory_order_relaxed); }

  /// Returns whether memory was refused since the last call: what is unused should be given back.
  bool take_short() { return is_short_.exchange(false, std::memory_order_relaxed); }

  std::uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_; }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const std::uint64_t limit_;
  std::atomic<std::uint64_t> used_ = 0;
  std::atomic<std::uint64_t> refused_ = 0;
  std::atomic<bool> is_short_ = false;
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

// Numbers objects in the order of their first use: a linear scan while they are few, a hash table after that.
#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace telegrad::codec {

class PointerIndex {
 public:
  static constexpr std::size_t kAbsent = static_cast<std::size_t>(-1);

  std::size_t size() const { return seen_.empty() ? few_ : seen_.size(); }

  std::size_t find(const void* p) const {
    if (seen_.empty()) {
      for (std::size_t i = 0; i < few_; ++i)
        if (inline_[i] == p) return i;
      return kAbsent;
    }
    const auto it = seen_.find(p);
    return it == seen_.end() ? kAbsent : it->second;
  }

  /// Adds `p`, which must be absent. Its number is the previous size.
  void add(const void* p) {
    if (seen_.empty() && few_ < kFew) {
      inline_[few_++] = p;
      return;
    }
    if (seen_.empty())
      for (std::size_t i = 0; i < few_; ++i) seen_.emplace(inline_[i], i);
    seen_.emplace(p, seen_.size());
  }

  /// Adds `p`; returns false if it is present.
  bool insert(const void* p) {
    if (find(p) != kAbsent) return false;
    add(p);
    return true;
  }

 private:
  static constexpr std::size_t kFew = 16;
  const void* inline_[kFew];
  std::size_t few_ = 0;
  std::unordered_map<const void*, std::size_t> seen_;
};

}  // namespace telegrad::codec

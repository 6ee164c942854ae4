// Bytes of the requests without a reply on one connection, at either end. Pure: no clock, no locks.
//
// Only large requests count: the bytes of small ones are limited by their number, and counting them would cost each
// call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "core/tuning.h"

namespace telegrad {

class RequestBytes {
 public:
  /// Returns whether a request of this weight counts.
  static bool is_counted(std::int64_t size) { return size > kLargePayload; }

  bool empty() const { return sizes_.empty(); }
  std::int64_t total() const { return total_; }
  /// Returns the total without the largest request.
  std::int64_t total_of_others() const {
    std::int64_t largest = 0;
    for (const auto& [call, size] : sizes_) largest = std::max(largest, size);
    return total_ - largest;
  }
  bool contains(std::uint64_t call) const { return sizes_.contains(call); }
  /// Returns whether a request fits into the limit, after others. Up to half the limit any size does, so that a very
  /// large request is not stuck while others go on.
  static bool has_room(std::int64_t total, std::int64_t size, std::int64_t limit) {
    return total <= limit / 2 || size <= limit - total;
  }
  bool has_room(std::int64_t size, std::int64_t limit) const { return has_room(total_, size, limit); }

  /// Counts the request of a call if it is large and not counted yet.
  void add(std::uint64_t call, std::int64_t size) {
    if (is_counted(size) && sizes_.emplace(call, size).second) total_ += size;
  }
  /// Returns whether the request of a call was counted; it is not any more.
  bool remove(std::uint64_t call) {
    const auto found = sizes_.find(call);
    if (found == sizes_.end()) return false;
    total_ -= found->second;
    sizes_.erase(found);
    return true;
  }

 private:
  std::unordered_map<std::uint64_t, std::int64_t> sizes_;  // by call
  std::int64_t total_ = 0;
};

}  // namespace telegrad

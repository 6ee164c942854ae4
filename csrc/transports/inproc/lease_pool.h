// Memory that the links within one process lease.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "core/transport.h"

namespace telegrad {

/// Leased memory of one link. Each lease has as many holders as there are blocks for it: the sender's, the receiver's,
/// or for a short time both. Thread-safe, also in a forked child, which may release memory that it inherited.
class LeasePool : public std::enable_shared_from_this<LeasePool> {
 public:
  /// Leases memory; null if not enough is left.
  std::optional<LinkLease> lease(std::size_t size);

  /// Returns the receiver's block for a lease, or a part of it; null if the lease is unknown or has been passed on.
  BlockPtr pass(const OutSegment& segment);

 private:
  struct Region {
    std::byte* memory;
    std::size_t size;
    int holders;
  };
  class Holder;

  BlockPtr hold(std::uint64_t lease, std::size_t begin, std::size_t size);
  void release(std::uint64_t lease);

  // Guarded by one mutex for all pools.
  std::map<std::uint64_t, Region> regions_;
  std::uint64_t next_ = 1;
  std::size_t leased_ = 0;
};

}  // namespace telegrad

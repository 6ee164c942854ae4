// Copies into shared memory.
#pragma once

#include <cstddef>

namespace telegrad {

/// Copies like memcpy. Large copies bypass the caches, which is 1.5 times as fast.
void copy_to_shared(std::byte* to, const std::byte* from, std::size_t size, bool cached);

/// Copies of at least this size bypass the caches.
inline constexpr std::size_t kNonTemporalSize = std::size_t{16} << 20;

}  // namespace telegrad

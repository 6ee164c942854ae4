// Copies into shared memory.
#pragma once

#include <cstddef>

namespace telegrad {

/// As memcpy; what is too large to be found in a cache later does not go through one, which is half as fast again.
void copy_to_shared(std::byte* to, const std::byte* from, std::size_t size, bool cached);

/// From this size on a copy does not stay in a cache.
inline constexpr std::size_t kBeyondCaches = std::size_t{16} << 20;

}  // namespace telegrad

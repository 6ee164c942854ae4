#include "memory/copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace telegrad {
namespace {

#ifdef __SSE2__
/// Copies with stores that bypass the caches: a line that is overwritten entirely is not read first. `to` is aligned to
/// 64 bytes.
void stream(std::byte* to, const std::byte* from, std::size_t size) {
  constexpr std::size_t kLine = 64, kAhead = 512;
  for (std::size_t i = 0; i < size; i += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + kAhead), _MM_HINT_NTA);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
}
#endif

}  // namespace

void copy_to_shared(std::byte* to, const std::byte* from, std::size_t size, [[maybe_unused]] bool cached) {
#ifdef __SSE2__
  constexpr std::size_t kLine = 64;
  if (!cached && reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
    const std::size_t lines = size / kLine * kLine;
    stream(to, from, lines);
    to += lines;
    from += lines;
    size -= lines;
  }
#endif
  std::memcpy(to, from, size);
}

}  // namespace telegrad

// Bounds-checked reader of bytes. Every method returns whether it could read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace telegrad::codec {

class Reader {
 public:
  Reader(const char* data, std::size_t size) : next_(data), end_(data + size) {}

  std::size_t left() const { return static_cast<std::size_t>(end_ - next_); }

  bool byte(std::uint8_t& out) {
    if (next_ == end_) return false;
    out = static_cast<std::uint8_t>(*next_++);
    return true;
  }

  bool varint(std::uint64_t& out) {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      std::uint8_t b;
      if (!byte(b)) return false;
      if (shift == 63 && b > 1) return false;  // beyond 64 bits
      value |= static_cast<std::uint64_t>(b & 0x7f) << shift;
      if (b < 0x80) {
        out = value;
        return true;
      }
    }
    return false;
  }

  template <class Number>
  bool number(Number& out) {
    if (left() < sizeof out) return false;
    std::memcpy(&out, next_, sizeof out);
    next_ += sizeof out;
    return true;
  }

  /// Returns `n` bytes in place; nullptr if fewer are left.
  const char* raw(std::uint64_t n) {
    if (n > left()) return nullptr;
    const char* at = next_;
    next_ += n;
    return at;
  }

 private:
  const char* next_;
  const char* end_;
};

}  // namespace telegrad::codec

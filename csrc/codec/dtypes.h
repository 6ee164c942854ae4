// The element types of tensors on the wire: their code, torch's name, DLPack's (code, bits), in one table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace telegrad::codec {

struct DType {
  std::uint8_t code;     // on the wire; never reused for another type
  const char* name;      // attribute of `torch`
  std::uint8_t dl_code;  // DLDataTypeCode
  std::uint8_t bits;     // of one element
  bool can_require_grad;
  std::size_t size() const { return bits / 8; }
  bool is_complex() const { return dl_code == 5; }
};

inline constexpr std::array<DType, 21> kDTypes{{
    {1, "bool", 6, 8, false},
    {2, "uint8", 1, 8, false},
    {3, "int8", 0, 8, false},
    {4, "int16", 0, 16, false},
    {5, "int32", 0, 32, false},
    {6, "int64", 0, 64, false},
    {7, "uint16", 1, 16, false},
    {8, "uint32", 1, 32, false},
    {9, "uint64", 1, 64, false},
    {10, "float16", 2, 16, true},
    {11, "float32", 2, 32, true},
    {12, "float64", 2, 64, true},
    {13, "bfloat16", 4, 16, true},
    {14, "complex32", 5, 32, true},
    {15, "complex64", 5, 64, true},
    {16, "complex128", 5, 128, true},
    {17, "float8_e4m3fn", 10, 8, true},
    {18, "float8_e4m3fnuz", 11, 8, true},
    {19, "float8_e5m2", 12, 8, true},
    {20, "float8_e5m2fnuz", 13, 8, true},
    {21, "float8_e8m0fnu", 14, 8, true},
}};

consteval bool codes_count_from_one() {
  for (std::size_t i = 0; i < kDTypes.size(); ++i)
    if (kDTypes[i].code != i + 1) return false;
  return true;
}
static_assert(codes_count_from_one());

inline const DType* dtype_of_code(std::uint8_t code) {
  return code >= 1 && code <= kDTypes.size() ? &kDTypes[code - 1] : nullptr;
}

inline const DType* dtype_of_dlpack(std::uint8_t dl_code, std::uint8_t bits, std::uint16_t lanes) {
  if (lanes != 1) return nullptr;
  for (const DType& d : kDTypes)
    if (d.dl_code == dl_code && d.bits == bits) return &d;
  return nullptr;
}

/// torch's uint1..uint7 and int1..int7 are 8-bit integers in DLPack.
inline bool is_ambiguous_to_dlpack(const DType& d) { return d.bits == 8 && d.dl_code <= 1; }

}  // namespace telegrad::codec

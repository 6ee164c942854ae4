// The bytes of a plain value. One page that encoder and decoder both obey.
//
//   body    = main | tables | footer
//   main    = value
//   tables  = varint tensor_count, tensor x count, varint extension_count, extension x count    (absent if both are 0)
//   footer  = u64 offset of tables, u8 kHasTables     or only     u8 kNoTables
//
// A value is one tag byte and what the tag asks for. Small integers, short strings and short containers have their
// value, length or count in the tag itself:
//
//   00..7f  int 0..127            80..8f  tuple of n            90..9f  list of n             a0..bf  str of n bytes
//   c0..ce  see Tag               d0..d7  dict of n             e0..ef  tensor n of the table f0..f7  extension n
//
// Integers are zigzag varints, lengths are varints, floats are 8 bytes; everything is little-endian.
//
//   tensor    = u8 dtype, u8 TensorFlags, varint ndim, varint x ndim shape, [varint x ndim strides]
//   extension = varint slot, varint code, value
//
// The tensors of the table that have memory take the message's segments in order, one each. Tables stand behind the
// value and are read before it: the encoder learns what they hold while it writes the value, and an extension is only
// packed (which may have effects, such as handing out a reference) when all the rest is known to be plain.
#pragma once

#include <cstddef>
#include <cstdint>

namespace telegrad::codec {

enum Footer : std::uint8_t { kNoTables = 0, kHasTables = 1 };

enum Tag : std::uint8_t {
  kFixInt = 0x00,
  kFixTuple = 0x80,
  kFixList = 0x90,
  kFixStr = 0xa0,
  kNone = 0xc0,
  kFalse = 0xc1,
  kTrue = 0xc2,
  kInt = 0xc3,      // zigzag varint
  kBigInt = 0xc4,   // varint length, two's complement
  kFloat = 0xc5,    // f64
  kComplex = 0xc6,  // f64 real, f64 imaginary
  kStr = 0xc7,      // varint length, UTF-8
  kBytes = 0xc8,    // varint length
  kTuple = 0xc9,    // varint count, values
  kList = 0xca,     // varint count, values
  kDict = 0xcb,     // varint count, (key, value) pairs in order
  kTensorRef = 0xcc,
  kExtensionRef = 0xcd,
  kFixDict = 0xd0,
  kFixTensorRef = 0xe0,
  kFixExtensionRef = 0xf0,
};

// How many values each range of tags with something inside has.
inline constexpr std::uint64_t kFixInts = 128, kFixTuples = 16, kFixLists = 16, kFixStrs = 32, kFixDicts = 8,
                               kFixTensorRefs = 16, kFixExtensionRefs = 8;

enum TensorFlags : std::uint8_t {
  kRequiresGrad = 1,
  kStrided = 2,    // strides follow the shape; without it the layout is contiguous
  kHasMemory = 4,  // takes the next segment; a tensor without elements has none
  kGraphCut = 8,   // requires grad, and ends a graph that stays with the sender, since the message is not recorded
  kAllTensorFlags = 15,
};

inline constexpr int kMaxTensorDims = 64;  // torch's own limit

/// A value has at least so many bytes in the body; what a count claims is checked against it before memory is reserved.
inline constexpr std::size_t kMinValueBytes = 1, kMinTensorBytes = 3, kMinExtensionBytes = 3;

}  // namespace telegrad::codec

// The byte format of a plain value, for encoder and decoder.
//
//   body    = main | tables | footer
//   main    = value
//   tables  = varint tensor_count, tensor x count, varint extension_count, extension x count    (absent if both are 0)
//   footer  = u64 offset of tables, u8 kHasTables     or only     u8 kNoTables
//
// A value is one tag byte and the data of this tag. Small integers, short strings and short containers have their
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
// Tensors with memory use the message's segments in order, one each. The tables follow the value but are read before
// it, because the encoder fills them while it writes the value. Extensions are packed last: packing may have side
// effects, such as creating a ticket, and so must not run before all the rest has been encoded.
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

// Number of values per element of each container tag.
inline constexpr std::uint64_t kFixInts = 128, kFixTuples = 16, kFixLists = 16, kFixStrs = 32, kFixDicts = 8,
                               kFixTensorRefs = 16, kFixExtensionRefs = 8;

enum TensorFlags : std::uint8_t {
  kRequiresGrad = 1,
  kStrided = 2,    // strides follow the shape; else the layout is contiguous
  kHasMemory = 4,  // uses the next segment; a tensor without elements has none
  kGraphCut = 8,   // requires grad, but its graph ends at the sender, because the message is not recorded
  kAllTensorFlags = 15,
};

inline constexpr int kMaxTensorDims = 64;  // torch's own limit

/// Objects of a decoded value, in units of 64 bytes: a value that takes one byte here may be an object of that size. A
/// tensor is much larger.
inline constexpr std::uint64_t kMaxObjects = std::uint64_t{32} << 20, kObjectsPerTensor = 16;

/// Least size of a value in the body. Counts are checked against it before memory is reserved.
inline constexpr std::size_t kMinValueBytes = 1, kMinTensorBytes = 3, kMinExtensionBytes = 3;

}  // namespace telegrad::codec

// Python within a fuzzer, and a codec whose tensors are plain Python objects, made without torch. They arrive through
// DLPack as torch's do; each one reads the first and the last byte of its memory.
#pragma once

#include "codec/codec.h"

namespace telegrad::fuzz {

/// Starts Python, once, and returns a codec with one extension.
const codec::Codec& codec();

/// Memory of a received segment, of exactly this size and aligned like the buffer pool's, filled with zeros.
codec::SegmentMemory segment_of(std::size_t size);

}  // namespace telegrad::fuzz

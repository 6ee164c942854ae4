// Numbers of the wire that the native call path reads. telegrad.wire has the same ones and their meaning; a test
// compares the two (tests/static/test_wire.py).
#pragma once

namespace telegrad::bind::wire {

// Tags
inline constexpr int kCall = 1, kGradients = 7, kValue = 16, kCreated = 18, kContextEnded = 35;

// Flags
inline constexpr int kBody = 0b11, kMetadata = 1 << 2, kNoGrad = 1 << 3, kInference = 1 << 4, kKeepAs = 1 << 7,
                     kReceiver = 1 << 8, kLeftOut = 1 << 13, kMustDeliver = 1 << 14;

/// A reply with any of these is completed by Python, except for metadata that only records tensors.
inline constexpr int kSlowReply = kMetadata | kBody | kLeftOut;
/// A request with any of these is decoded by Python, likewise.
inline constexpr int kSlowRequest = kSlowReply | kNoGrad | kInference;

/// All of them, under telegrad.wire's names.
struct Number {
  const char* table;
  const char* name;
  int value;
};
inline constexpr Number kNumbers[] = {
    {"Tag", "CALL", kCall},
    {"Tag", "GRADIENTS", kGradients},
    {"Tag", "VALUE", kValue},
    {"Tag", "CREATED", kCreated},
    {"Tag", "CONTEXT_ENDED", kContextEnded},
    {"Flag", "BODY", kBody},
    {"Flag", "PREAMBLE", kMetadata},
    {"Flag", "NO_GRAD", kNoGrad},
    {"Flag", "INFERENCE", kInference},
    {"Flag", "KEEP_AS", kKeepAs},
    {"Flag", "RECEIVER", kReceiver},
    {"Flag", "LEFT_OUT", kLeftOut},
    {"Flag", "MAY_LINGER", kMustDeliver},
};

}  // namespace telegrad::bind::wire

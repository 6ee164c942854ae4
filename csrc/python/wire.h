// Numbers of the wire that the native call path reads; wire/constants.h is generated from telegrad.wire.
#pragma once

#include "wire/constants.h"

namespace telegrad::python::wire {

using telegrad::wire::Flag;
using telegrad::wire::MetadataField;
using telegrad::wire::NodeKind;
using telegrad::wire::ScopeField;
using telegrad::wire::Tag;

inline constexpr int kCall = Tag::kCall, kGradients = Tag::kGradients, kValue = Tag::kValue, kCreated = Tag::kCreated,
                     kContextEnded = Tag::kContextEnded;
inline constexpr int kBody = Flag::kBody, kMetadata = Flag::kMetadata, kNoGrad = Flag::kNoGrad,
                     kInference = Flag::kInference, kKeepAs = Flag::kKeepAs, kReceiver = Flag::kReceiver,
                     kLeftOut = Flag::kLeftOut, kMustDeliver = Flag::kMustDeliver, kMustRun = Flag::kMustRun;

/// A reply with any of these flags takes the slow path, except for metadata that only records tensors.
inline constexpr int kSlowReply = kMetadata | kBody | kLeftOut;
/// A request with any of these flags takes the slow path, with the same exception.
inline constexpr int kSlowRequest = kSlowReply | kNoGrad | kInference;

}  // namespace telegrad::python::wire

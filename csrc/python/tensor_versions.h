// Whether the memory of a sent message has changed, for messages that are sent again (core/resumable.h).
//
// PyTorch counts the changes of a tensor: each in-place operation increments its version, which its views and detached
// aliases share. Not counted are writes by fused optimizers, through `.data`, by NumPy, or by another process. Samples
// of the memory reveal those that change all of it. An inference tensor has no version: its memory cannot change if the
// message is the only holder.
#pragma once

#include "core/message.h"

namespace telegrad::python {

/// Records the versions of a message's tensors, if all of its segments are bytes or have owners with a version
/// (codec/tensor.h): then the message becomes `verifiable`. Call it right before sending, with the GIL and without a
/// lock of the core.
void record_versions(Outgoing& message);

}  // namespace telegrad::python

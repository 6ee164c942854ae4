// Memory that a link has lent, for a tensor of the program's, or with one that came: on its way out with a message.
//
// A tensor can be handed over as it is only if nobody else has it: its receiver may write to it, and so may whoever
// kept it here. Who that is only torch knows; but when the last of them lets go, the memory is released. So a message
// takes hold of the memory beside the tensor, lets go of the tensor, and looks whether it is the only one left.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec/memory.h"
#include "core/engine.h"

namespace telegrad::python {

/// Is there any such memory? Cheap.
bool any_leases();

/// A message is about to leave on a connection, and nothing in this thread holds its tensors but the message: it gives
/// up those that lie in memory of the connection's, or of one that it does not know, and names the leases of those that
/// nobody else holds either. With the GIL held and no lock of the core.
void hand_off_leases(Outgoing& message, std::uint64_t connection);

/// Memory for a tensor that is to go to a peer, as an object with a buffer; None if there is none. See `Engine::lease`.
nanobind::object lease(Engine& engine, std::int32_t peer, std::uint64_t connection, std::size_t size);

/// Received memory on its way into a tensor. What a link has lent goes back over it as it is, if it is all that is left
/// of it: see `hand_off_leases`.
codec::SegmentMemory memory_of(BlockPtr block);
/// The same as an object with a buffer.
nanobind::object object_of(BlockPtr block);

void init_buffer_leases(nanobind::module_& m);

}  // namespace telegrad::python

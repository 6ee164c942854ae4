// Leased memory of a link, requested by the program or received with a tensor, that is sent with a message.
//
// A tensor can be sent without a copy only if no other code holds it: its receiver may write to it. Only torch knows
// all holders of a tensor, but the last one releases its memory. So a message references the memory in addition to the
// tensor, releases the tensor, and checks whether its reference is the only one left.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec/memory.h"
#include "core/engine.h"

namespace telegrad::python {

/// Returns whether any memory is leased. Cheap.
bool any_leases();

/// Hands off the tensors of a message that is about to be sent on a connection, if no other code of this thread holds
/// them: the message releases those in memory of the connection or of an unknown one, and names the leases of those
/// without another holder. Requires the GIL and no lock of the core.
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

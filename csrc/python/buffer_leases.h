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

/// Prepares tensors in leased memory to be sent without a copy: the message releases those in memory of the connection
/// (or of an unknown one), and names the leases that have no other holder. Call it right before sending, with the GIL
/// and without a lock of the core.
void hand_off_leases(Outgoing& message, std::uint64_t connection);

/// Leases memory for a tensor that will be sent to a peer. Returns an object with the buffer interface, or None if the
/// link leases none. See `Engine::lease`.
nanobind::object lease(Engine& engine, std::int32_t peer, std::uint64_t connection, std::size_t size);

/// Returns received memory for a tensor. Memory leased from a link can return without a copy: see `hand_off_leases`.
codec::SegmentMemory memory_of(BlockPtr block);
/// Returns received memory as an object with the buffer interface.
nanobind::object object_of(BlockPtr block);

void init_buffer_leases(nanobind::module_& m);

}  // namespace telegrad::python

// Conversion of messages between Python objects and the core. All functions need the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "core/engine.h"
#include "python/deferred_decref.h"

namespace telegrad::python {

namespace nb = nanobind;

inline constexpr std::uint64_t kSmall = 16 << 10;  // up to here a copy is cheaper than releasing the GIL

inline std::string_view view(const nb::bytes& b) { return {b.c_str(), b.size()}; }

/// Creates a message without segments.
std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body);
/// Creates a message with `segments`: None, or a list of (address, size, owner) or bytes.
std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body, nb::handle segments);
/// Creates a message from an `Encoded` of telegrad.worker.calls.encoded, with further flags.
std::unique_ptr<Outgoing> compose_encoded(int tag, int flags, nb::handle encoded);
/// Creates a message from the output of the codec.
std::unique_ptr<Outgoing> compose(int tag, int flags, codec::Encoded& encoded);

void add_segment(Outgoing& m, const void* data, std::uint64_t size, nb::handle owner);
void set_name(Outgoing& m, std::uint32_t id, nb::handle name);

/// Destroys a message that has been sent or given up, and releases its Python references.
void release_message(std::unique_ptr<Outgoing>& m);

/// Processes an item of kVerify, without the GIL. Needs the GIL.
void verify(Engine& e, const WorkItem& item);

/// Converts a completion to a tuple, see wire::CompletionField.
nb::tuple completion_tuple(Completion&& o);

/// Converts a work item to a tuple; for its kinds see wire::MessageItemField and the tables after it.
nb::tuple work_item_tuple(WorkItem&& item);

/// Waits for the next work item of a pool thread; releases the GIL only if it has to wait, after `before_sleep`.
/// Returns false when the engine has stopped.
bool next_work_item(Engine& e, PoolThread& thread, WorkItem& item, const std::function<void()>& before_sleep = [] {});

/// Python objects kept with a name on a connection.
struct NameHandle {
  PyRefs text;               // bytes
  PyRefs resolver;           // callable; empty until it is first needed
  bool is_admitted = false;  // the worker exposes the function
};
NameHandle& handle_of(const Name& name);
nb::object name_object(const std::shared_ptr<const Name>& name);

/// Returns received segments as memory for the codec, and empties the list.
std::vector<codec::SegmentMemory> memories_of(std::vector<BlockPtr>& segments);

}  // namespace telegrad::python

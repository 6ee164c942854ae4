// Messages between Python objects and the core. Everything here needs the GIL.
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

/// A message without segments.
std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body);
/// The same; `segments`: None, or a list of (address, size, owner) or bytes.
std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body, nb::handle segments);
/// The same of what the codec has written.
std::unique_ptr<Outgoing> compose(int tag, int flags, codec::Encoded& encoded);

void add_segment(Outgoing& m, const void* data, std::uint64_t size, nb::handle owner);
void set_name(Outgoing& m, std::uint32_t id, nb::handle name);

/// The message has left (or never will): gives up what it held.
void release_message(std::unique_ptr<Outgoing>& m);

/// (status, tag, flags, body, segments, peer, why)
nb::tuple completion_tuple(Completion&& o);

/// As `Engine.next` gives it to Python.
nb::tuple work_item_tuple(WorkItem&& item);

/// The next thing to do, by a pool thread; releases the GIL only to wait for it. False when the engine has stopped.
bool next_work_item(Engine& e, PoolThread& thread, WorkItem& item, const std::function<void()>& before_sleep = [] {});

/// What the layers above keep with a name on a connection.
struct NameHandle {
  PyRefs text;      // bytes
  PyRefs resolver;  // callable; empty until it is first needed
};
NameHandle& handle_of(const Name& name);
nb::object name_object(const std::shared_ptr<const Name>& name);

/// What arrived, for the codec.
std::vector<codec::SegmentMemory> memories_of(std::vector<BlockPtr>& segments);

}  // namespace telegrad::python

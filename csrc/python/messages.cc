#include "python/messages.h"

#include <nanobind/stl/string.h>

#include "codec/gil.h"
#include "python/block.h"
#include "python/buffer_leases.h"

namespace telegrad::python {
namespace {

PyRefs& kept_by(Outgoing& m) { return static_cast<PyRefs&>(*m.owner); }

}  // namespace

void add_segment(Outgoing& m, const void* data, std::uint64_t size, nb::handle owner) {
  m.segments.push_back({static_cast<const std::byte*>(data), size});
  kept_by(m).add(owner);
}

std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body) {
  auto m = std::make_unique<Outgoing>();
  auto owner = std::make_unique<PyRefs>();
  m->header.tag = static_cast<std::uint8_t>(tag);
  m->header.flags = static_cast<std::uint16_t>(flags);
  m->body = {PyBytes_AS_STRING(body.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(body.ptr()))};
  owner->add(body);
  m->owner = std::move(owner);
  return m;
}

std::unique_ptr<Outgoing> compose(int tag, int flags, nb::handle body, nb::handle segments) {
  auto m = compose(tag, flags, body);
  if (segments.is_none()) return m;
  for (nb::handle s : nb::cast<nb::list>(segments)) {
    if (PyBytes_CheckExact(s.ptr())) {
      const auto bytes = nb::borrow<nb::bytes>(s);
      add_segment(*m, bytes.c_str(), bytes.size(), bytes);
    } else {
      const auto t = nb::cast<nb::tuple>(s);
      add_segment(*m, reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(t[0])), nb::cast<std::uint64_t>(t[1]),
                  t[2]);
    }
  }
  return m;
}

std::unique_ptr<Outgoing> compose(int tag, int flags, codec::Encoded& encoded) {
  auto m = compose(tag, flags, encoded.body);
  m->segments.reserve(encoded.segments.size());
  for (codec::Segment& s : encoded.segments) {
    add_segment(*m, reinterpret_cast<const void*>(s.address), s.nbytes,
                encoded.versioned ? codec::versioned_owner(s) : s.owner);
  }
  return m;
}

void set_name(Outgoing& m, std::uint32_t id, nb::handle name) {
  if (id == 0) return;
  const auto text = nb::cast<nb::bytes>(name);
  m.header.name_id = id;
  m.name = view(text);
  kept_by(m).add(text);
}

void release_message(std::unique_ptr<Outgoing>& m) {
  if (!m) return;
  if (m->owner && !m->immutable) kept_by(*m).release();
  m.reset();
}

void verify(Engine& e, const WorkItem& item) {
  const GilReleased no_gil;
  e.verify(item);
}

nb::tuple completion_tuple(Completion&& o) {
  nb::object why = o.why.empty() ? nb::none() : nb::object(nb::str(o.why.c_str(), o.why.size()));
  return nb::make_tuple(static_cast<int>(o.status), o.reply.header.tag, o.reply.header.flags,
                        body_object(std::move(o.reply.body)), segment_list(std::move(o.reply.segments)), o.peer,
                        o.connection, why, static_cast<int>(o.loss));
}

nb::tuple work_item_tuple(WorkItem&& item) {
  const int kind = static_cast<int>(item.kind);
  switch (item.kind) {
    case WorkKind::kRequest:
    case WorkKind::kOneway: {
      const FrameHeader& h = item.message.header;
      return nb::make_tuple(kind, item.needs_thread, item.peer, item.connection, h.call_id, h.tag, h.flags,
                            name_object(item.name), body_object(std::move(item.message.body)),
                            segment_list(std::move(item.message.segments)),
                            item.deadline == kNever ? Nanos{0} : item.deadline);
    }
    case WorkKind::kCompletion: {
      nb::object target = nb::none();
      if (item.target) target = nb::borrow(static_cast<PyRefs&>(*item.target).front());
      return nb::make_tuple(kind, item.needs_thread, target, completion_tuple(item.take_completion()));
    }
    case WorkKind::kEvent:
      return nb::make_tuple(kind, item.needs_thread, static_cast<int>(item.event), item.peer, item.incarnation,
                            item.text);
    case WorkKind::kCancel:
      return nb::make_tuple(kind, item.needs_thread, item.connection, item.message.header.call_id);
    case WorkKind::kExitThread:
    case WorkKind::kNoWork:
    case WorkKind::kVerify:
      break;
  }
  return nb::make_tuple(kind, item.needs_thread);
}

NameHandle& handle_of(const Name& name) {
  if (!name.handle) {
    auto handle = std::make_shared<NameHandle>();
    handle->text.add(nb::bytes(name.text.data(), name.text.size()));
    name.handle = std::move(handle);
  }
  return *static_cast<NameHandle*>(name.handle.get());
}

nb::object name_object(const std::shared_ptr<const Name>& name) {
  return name ? nb::borrow(handle_of(*name).text.front()) : nb::none();
}

bool next_work_item(Engine& e, PoolThread& thread, WorkItem& item, const std::function<void()>& before_sleep) {
  // While there is work, this thread keeps the GIL: releasing it briefly can cost a switch interval.
  decref_deferred();  // references of the last item, before this thread sleeps
  bool more = e.try_next(thread, item);
  if (!more) {
    before_sleep();
    const GilReleased no_gil;
    const WakePoolOnDecref wake_pool(e);
    more = e.next(thread, item);
  }
  decref_deferred();
  return more;
}

std::vector<codec::SegmentMemory> memories_of(std::vector<BlockPtr>& segments) {
  std::vector<codec::SegmentMemory> memories;
  memories.reserve(segments.size());
  for (BlockPtr& s : segments) memories.push_back(memory_of(std::move(s)));
  segments.clear();
  return memories;
}

}  // namespace telegrad::python

#include "python/messages.h"

#include <nanobind/stl/string.h>

#include "codec/gil.h"
#include "python/block.h"
#include "python/buffer_leases.h"
#include "python/field_tuple.h"
#include "wire/constants.h"

namespace telegrad::python {
namespace {

PyRefs& kept_by(Outgoing& m) { return static_cast<PyRefs&>(*m.owner); }

/// Begins the tuple of a work item with the fields that all have.
template <class Field>
FieldTuple<Field> item_fields(const WorkItem& item) {
  FieldTuple<Field> fields;
  fields.set(Field::kKind, static_cast<int>(item.kind));
  fields.set(Field::kNeedsThread, item.needs_thread);
  return fields;
}

nb::tuple message_item(WorkItem&& item) {
  using Field = wire::MessageItemField;
  const FrameHeader& h = item.message.header;
  auto fields = item_fields<Field>(item);
  fields.set(Field::kPeer, item.peer);
  fields.set(Field::kConnection, item.connection);
  fields.set(Field::kCall, h.call_id);
  fields.set(Field::kTag, h.tag);
  fields.set(Field::kFlags, h.flags);
  fields.set(Field::kName, name_object(item.name));
  fields.set(Field::kBody, body_object(std::move(item.message.body)));
  fields.set(Field::kSegments, segment_list(std::move(item.message.segments)));
  fields.set(Field::kDeadline, item.deadline == kNever ? Nanos{0} : item.deadline);
  return fields.take();
}

nb::tuple completion_item(WorkItem&& item) {
  using Field = wire::CompletionItemField;
  auto fields = item_fields<Field>(item);
  fields.set(Field::kTarget, item.target ? nb::borrow(static_cast<PyRefs&>(*item.target).front()) : nb::none());
  fields.set(Field::kCompletion, completion_tuple(item.take_completion()));
  return fields.take();
}

nb::tuple event_item(WorkItem&& item) {
  using Field = wire::EventItemField;
  auto fields = item_fields<Field>(item);
  fields.set(Field::kEvent, static_cast<int>(item.event));
  fields.set(Field::kPeer, item.peer);
  fields.set(Field::kIncarnation, item.incarnation);
  fields.set(Field::kText, item.text);
  return fields.take();
}

nb::tuple cancel_item(const WorkItem& item) {
  using Field = wire::CancelItemField;
  auto fields = item_fields<Field>(item);
  fields.set(Field::kConnection, item.connection);
  fields.set(Field::kCall, item.message.header.call_id);
  return fields.take();
}

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

std::unique_ptr<Outgoing> compose_encoded(int tag, int flags, nb::handle encoded) {
  return compose(tag, flags | nb::cast<int>(encoded.attr("flags")), encoded.attr("body"), encoded.attr("segments"));
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
  using Field = wire::CompletionField;
  FieldTuple<Field> fields;
  fields.set(Field::kStatus, static_cast<int>(o.status));
  fields.set(Field::kTag, o.reply.header.tag);
  fields.set(Field::kFlags, o.reply.header.flags);
  fields.set(Field::kBody, body_object(std::move(o.reply.body)));
  fields.set(Field::kSegments, segment_list(std::move(o.reply.segments)));
  fields.set(Field::kPeer, o.peer);
  fields.set(Field::kConnection, o.connection);
  fields.set(Field::kWhy, o.why.empty() ? nb::none() : nb::object(nb::str(o.why.c_str(), o.why.size())));
  fields.set(Field::kLoss, static_cast<int>(o.loss));
  return fields.take();
}

nb::tuple work_item_tuple(WorkItem&& item) {
  switch (item.kind) {
    case WorkKind::kRequest:
    case WorkKind::kOneway:
      return message_item(std::move(item));
    case WorkKind::kCompletion:
      return completion_item(std::move(item));
    case WorkKind::kEvent:
      return event_item(std::move(item));
    case WorkKind::kCancel:
      return cancel_item(item);
    case WorkKind::kExitThread:
    case WorkKind::kNoWork:
    case WorkKind::kVerify:
      break;
  }
  return nb::make_tuple(static_cast<int>(item.kind), item.needs_thread);
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

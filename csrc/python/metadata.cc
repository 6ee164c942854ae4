#include "python/metadata.h"

#include "codec/gil.h"
#include "python/block.h"
#include "python/errors.h"
#include "python/wire.h"

namespace telegrad::python {
namespace {

using Field = wire::MetadataField;

bool is_none(PyObject* metadata, int field) { return PyTuple_GET_ITEM(metadata, field) == Py_None; }

}  // namespace

bool is_encoded(codec::EncodeStatus status) {
  if (status == codec::EncodeStatus::kError) throw nb::python_error();
  return status == codec::EncodeStatus::kOk;
}

std::unique_ptr<Outgoing> encode_basic(const codec::Codec& codec, int tag, int flags, nb::handle value) {
  codec::Encoded encoded;
  if (!is_encoded(codec.encode_basic(value.ptr(), encoded))) return nullptr;
  return compose(tag, flags, encoded);
}

nb::object id_of(nb::handle context) {
  return context.is_none() ? nb::none() : python_result(PyObject_GetAttrString(context.ptr(), "id"));
}

void add_metadata(Outgoing& m, const codec::Codec& codec, nb::handle target, nb::handle context, nb::handle message) {
  const nb::object metadata = python_result(PyTuple_Pack(Field::kCount, nb::tuple().ptr(), target.ptr(), Py_None,
                                                         context.ptr(), message.ptr(), Py_None, Py_None));
  codec::Encoded encoded;
  if (!is_encoded(codec.encode_basic(metadata.ptr(), encoded))) {
    PyErr_SetString(codec::codec_error(), "the metadata of a message cannot be encoded");
    throw nb::python_error();
  }
  add_segment(m, PyBytes_AS_STRING(encoded.body.ptr()),
              static_cast<std::uint64_t>(PyBytes_GET_SIZE(encoded.body.ptr())), encoded.body);
  m.header.flags |= wire::kMetadata;
}

AutogradHooks::AutogradHooks(const nb::object& hooks)
    : hooks_(hooks),
      on_send_(hooks.attr("on_send")),
      rollback_(hooks.attr("rollback")),
      on_request_(hooks.attr("on_request_in_context")),
      wrap_(hooks.attr("wrap")),
      plain_(hooks.attr("plain")),
      outside_(hooks.attr("outside")) {}

bool AutogradHooks::encode(const codec::Codec& codec, nb::handle value, std::int32_t peer, nb::handle context,
                           bool request, std::int64_t epoch, codec::Encoded& encoded, nb::object& message) const {
  message = nb::none();
  if (!is_encoded(codec.encode_recorded(value.ptr(), encoded, false))) return false;
  if (!request && encoded.recorded.empty()) return true;
  const nb::object tensors = python_result(PyTuple_New(static_cast<Py_ssize_t>(encoded.recorded.size())));
  for (std::size_t i = 0; i < encoded.recorded.size(); ++i)
    PyTuple_SET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i), encoded.recorded[i].release().ptr());
  message = python_result(call_python(on_send_.ptr(), context.ptr(), nb::int_(peer).ptr(), tensors.ptr(),
                                      request ? Py_True : Py_False, nb::int_(epoch).ptr()));
  return !request || !message.is_none();
}

void AutogradHooks::rollback(nb::handle context, nb::handle message, std::int32_t peer) const {
  python_result(call_python(rollback_.ptr(), context.ptr(), message.ptr(), nb::int_(peer).ptr(), Py_None));
}

bool AutogradHooks::read(const codec::Codec& codec, const Incoming& message, ContextTag& out) {
  if (message.segments.empty()) return false;
  const Block& last = *message.segments.back();
  const nb::object metadata =
      python_result(codec.decode({reinterpret_cast<const char*>(last.data()), last.size()}, {}));
  if (!PyTuple_CheckExact(metadata.ptr()) || PyTuple_GET_SIZE(metadata.ptr()) != Field::kCount) return false;
  const Py_ssize_t tickets = PyObject_Size(PyTuple_GET_ITEM(metadata.ptr(), Field::kTickets));
  if (tickets < 0) PyErr_Clear();
  const bool names_context = !is_none(metadata.ptr(), Field::kContext),
             names_target = !is_none(metadata.ptr(), Field::kTarget);
  if (tickets != 0 || !is_none(metadata.ptr(), Field::kAutocast) || !is_none(metadata.ptr(), Field::kProfile) ||
      names_context == names_target)
    return false;
  if (names_target) return true;
  PyObject* id = PyTuple_GET_ITEM(metadata.ptr(), Field::kContext);
  PyObject* number = PyTuple_GET_ITEM(metadata.ptr(), Field::kMessage);
  if (!PyLong_CheckExact(id) || !PyLong_CheckExact(number)) return false;  // malformed: Python raises the error
  int overflow = 0;
  if (PyLong_AsLongLongAndOverflow(id, &overflow) < 0 || overflow != 0) return false;  // a call chain: Python enters it
  out.id = nb::borrow(id);
  out.message = nb::borrow(number);
  return true;
}

bool AutogradHooks::is_unguarded() const {
  return in_python([&] { return nb::object(hooks_.attr("is_unguarded")); }).ptr() == Py_True;
}

nb::object AutogradHooks::on_request(const ContextTag& in, std::int32_t peer, std::uint64_t connection) const {
  return python_result(call_python(on_request_.ptr(), in.id.ptr(), nb::int_(peer).ptr(), nb::int_(connection).ptr()));
}

nb::object AutogradHooks::wrap(const ContextTag& in, std::int32_t peer, nb::handle context) const {
  const int recorded = PyObject_IsTrue(in.message.ptr());
  if (recorded < 0) throw nb::python_error();
  if (!recorded || context.is_none()) return {};
  return python_result(call_python(wrap_.ptr(), context.ptr(), nb::int_(peer).ptr(), in.message.ptr()));
}

int AutogradHooks::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o : {&hooks_, &on_send_, &rollback_, &on_request_, &wrap_, &plain_, &outside_})
    Py_VISIT(o->ptr());
  return 0;
}

}  // namespace telegrad::python

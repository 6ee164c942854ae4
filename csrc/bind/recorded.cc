#include "bind/recorded.h"

#include "bind/block.h"
#include "codec/gil.h"

namespace telegrad::bind {
namespace {

// The places of a preamble, see telegrad.worker.messages.
enum Place : Py_ssize_t { kTickets, kTarget, kAutocast, kContext, kMessage, kProfile, kPlaces };

nb::object called(PyObject* result) {
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

bool is_none(PyObject* preamble, Place place) { return PyTuple_GET_ITEM(preamble, place) == Py_None; }

}  // namespace

Recorder::Recorder(const nb::object& recorder)
    : recorder_(recorder),
      carry_(recorder.attr("carry")),
      receive_(recorder.attr("receive")),
      arrived_(recorder.attr("arrived")),
      partial_(nb::module_::import_("functools").attr("partial")) {}

std::unique_ptr<Outgoing> Recorder::encode(const codec::Codec& codec, const Words& words, int tag, int flags,
                                           nb::handle value, std::int32_t peer, nb::handle context,
                                           bool request) const {
  codec::Encoded encoded;
  if (!encodes(codec.encode_recorded(value.ptr(), encoded, false))) return nullptr;
  if (!request && encoded.recorded.empty()) return compose(tag, flags, encoded);
  nb::object tensors = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(encoded.recorded.size())));
  if (!tensors.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < encoded.recorded.size(); ++i)
    PyTuple_SET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i), encoded.recorded[i].release().ptr());
  const nb::object message = called(
      call_python(carry_.ptr(), context.ptr(), nb::int_(peer).ptr(), tensors.ptr(), request ? Py_True : Py_False));
  if (message.is_none()) return request ? nullptr : compose(tag, flags, encoded);

  const nb::object id = called(PyObject_GetAttrString(context.ptr(), "id"));
  const nb::object preamble =
      called(PyTuple_Pack(kPlaces, nb::tuple().ptr(), Py_None, Py_None, id.ptr(), message.ptr(), Py_None));
  codec::Encoded written;
  if (!encodes(codec.encode_basic(preamble.ptr(), written))) return nullptr;
  const nb::object& bytes = written.body;
  encoded.segments.push_back({.address = reinterpret_cast<std::uintptr_t>(PyBytes_AS_STRING(bytes.ptr())),
                              .nbytes = static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())),
                              .owner = bytes});
  // A request has been counted: its receiver waits for it when the context ends.
  return compose(tag, flags | words.preamble | (request ? words.may_linger : 0), encoded);
}

bool Recorder::read(const codec::Codec& codec, const Incoming& message, InContext& out) {
  if (message.segments.empty()) return false;
  const Block& last = *message.segments.back();
  const nb::object preamble = called(codec.decode({reinterpret_cast<const char*>(last.data()), last.size()}, {}));
  if (!PyTuple_CheckExact(preamble.ptr()) || PyTuple_GET_SIZE(preamble.ptr()) != kPlaces) return false;
  const Py_ssize_t tickets = PyObject_Size(PyTuple_GET_ITEM(preamble.ptr(), kTickets));
  if (tickets < 0) PyErr_Clear();
  if (tickets != 0 || !is_none(preamble.ptr(), kTarget) || !is_none(preamble.ptr(), kAutocast) ||
      is_none(preamble.ptr(), kContext) || !is_none(preamble.ptr(), kProfile))
    return false;
  out.id = nb::borrow(PyTuple_GET_ITEM(preamble.ptr(), kContext));
  out.message = nb::borrow(PyTuple_GET_ITEM(preamble.ptr(), kMessage));
  return true;
}

bool Recorder::runs() const {
  return called(in_python([&] { return PyObject_GetAttrString(recorder_.ptr(), "plain"); })).ptr() == Py_True;
}

nb::object Recorder::arrived(const InContext& in, std::int32_t peer) const {
  return called(call_python(arrived_.ptr(), in.id.ptr(), nb::int_(peer).ptr()));
}

nb::object Recorder::wrap(const InContext& in, std::int32_t peer, nb::handle context) const {
  const int recorded = PyObject_IsTrue(in.message.ptr());
  if (recorded < 0) throw nb::python_error();
  if (!recorded || context.is_none()) return {};
  return called(call_python(partial_.ptr(), receive_.ptr(), context.ptr(), nb::int_(peer).ptr(), in.message.ptr()));
}

int Recorder::traverse(visitproc visit, void* arg) const {
  for (const nb::object* o : {&recorder_, &carry_, &receive_, &arrived_, &partial_}) Py_VISIT(o->ptr());
  return 0;
}

}  // namespace telegrad::bind

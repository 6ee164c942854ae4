// Python interface of the codec.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "codec/codec.h"

namespace telegrad::codec {
namespace {

/// Any object with a simple buffer, exported for the duration of a call.
class BytesView {
 public:
  explicit BytesView(nb::handle object) {
    if (PyBytes_CheckExact(object.ptr())) {
      view_ = {PyBytes_AS_STRING(object.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
    } else {
      if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) < 0) throw nb::python_error();
      view_ = {static_cast<const char*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
    }
  }
  ~BytesView() {
    if (buffer_.obj) PyBuffer_Release(&buffer_);
  }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;
  std::string_view get() const { return view_; }

 private:
  Py_buffer buffer_{};
  std::string_view view_;
};

bool is_plain(EncodeStatus status) {
  if (status == EncodeStatus::kError) throw nb::python_error();
  return status == EncodeStatus::kOk;
}

nb::object segment_list(Encoded& encoded) {
  nb::object segments = nb::steal(PyList_New(static_cast<Py_ssize_t>(encoded.segments.size())));
  if (!segments) throw nb::python_error();
  const bool versioned = encoded.needs_versions();
  for (std::size_t i = 0; i < encoded.segments.size(); ++i) {
    Segment& segment = encoded.segments[i];
    if (versioned) segment.owner = versioned_owner(segment);
    PyObject* entry = Py_BuildValue("(KnN)", static_cast<unsigned long long>(segment.address),
                                    static_cast<Py_ssize_t>(segment.nbytes), segment.owner.release().ptr());
    if (!entry) throw nb::python_error();
    PyList_SET_ITEM(segments.ptr(), static_cast<Py_ssize_t>(i), entry);
  }
  return segments;
}

nb::object encode(const Codec& codec, nb::handle object) {
  Encoded encoded;
  if (!is_plain(codec.encode(object.ptr(), encoded))) return nb::none();
  return nb::make_tuple(encoded.body, segment_list(encoded));
}

nb::object encode_recorded(const Codec& codec, nb::handle object) {
  Encoded encoded;
  if (!is_plain(codec.encode_recorded(object.ptr(), encoded))) return nb::none();
  nb::list recorded;
  for (const nb::object& tensor : encoded.recorded) recorded.append(tensor);
  return nb::make_tuple(encoded.body, segment_list(encoded), recorded);
}

nb::object decode(const Codec& codec, nb::handle body, nb::handle segments, nb::handle wrap) {
  const BytesView bytes(body);
  // A copy: Python code that runs meanwhile may change the caller's list.
  nb::object objects = nb::steal(PySequence_Tuple(segments.ptr()));
  if (!objects) throw nb::python_error();
  const auto n = static_cast<std::size_t>(PyTuple_GET_SIZE(objects.ptr()));
  std::vector<SegmentMemory> memories;
  memories.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    memories.push_back(SegmentMemory::of_object(PyTuple_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i))));
    if (!memories.back().valid()) throw nb::python_error();
  }
  PyObject* result = codec.decode(bytes.get(), memories, wrap.is_none() ? nullptr : wrap.ptr());
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  return nb::inst_ready(self) ? nb::inst_ptr<Codec>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Codec>(self)->clear();
  return 0;
}

PyType_Slot codec_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

nb::list tensor_dtypes() {
  nb::list rows;
  for (const DType& d : kDTypes) rows.append(nb::make_tuple(d.code, d.name));
  return rows;
}

nb::tuple buffer_address(nb::handle object) {
  const BytesView bytes(object);
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(bytes.get().data()), bytes.get().size());
}

}  // namespace

void init_codec(nb::module_& m) {
  if (!codec_error()) throw nb::python_error();
  init_memory(m);
  m.attr("CodecError") = nb::borrow(codec_error());
  m.def("tensor_dtypes", &tensor_dtypes,
        "Return the tensor element types on the wire: (code, name of the torch dtype).");

  m.def("buffer_address", &buffer_address, nb::arg("object"),
        nb::sig("def buffer_address(object: object) -> tuple[int, int]"),
        "Return address and size in bytes of an object's contiguous buffer.\n\n"
        "Valid while the buffer is exported.");

  nb::class_<Codec>(
      m, "Codec", nb::type_slots(codec_slots),
      "Encoder and decoder of plain values and CPU tensors.\n\n"
      "The result is compact bytes and memory out of band. Codec-encodable are None, bool, int, float, complex,\n"
      "str, bytes, tuple, list, dict, dense CPU tensors and the registered types; subclasses are not.")
      .def(
          "__init__",
          [](Codec* self, nb::type_object tensor_type, nb::object exchange_api, nb::object encode_tensor,
             nb::object decode_tensor, int max_depth, nb::tuple byte_types, nb::object parameter_type,
             nb::object watch_cut, nb::object is_watched, std::uint64_t max_objects, nb::object too_many,
             nb::object forward_ad) {
            if (max_depth < 1 || max_depth > 1000) throw nb::value_error("max_depth must be from 1 to 1000");
            new (self) Codec(TensorBridge(std::move(tensor_type), std::move(exchange_api), std::move(encode_tensor),
                                          std::move(decode_tensor), std::move(byte_types), std::move(parameter_type),
                                          std::move(watch_cut), std::move(is_watched), std::move(forward_ad)),
                             max_depth, max_objects, too_many.is_none() ? nb::borrow(codec_error()) : too_many);
          },
          nb::arg("tensor_type"), nb::arg("exchange_api").none(), nb::arg("encode_tensor"), nb::arg("decode_tensor"),
          nb::arg("max_depth") = 64, nb::arg("byte_types") = nb::tuple(), nb::arg("parameter_type") = nb::none(),
          nb::arg("watch_cut") = nb::none(), nb::arg("is_watched") = nb::none(), nb::arg("max_objects") = kMaxObjects,
          nb::arg("too_many") = nb::none(), nb::arg("forward_ad") = nb::none())
      .def_prop_ro("max_objects", &Codec::max_objects, "The most objects of a decoded value, in units of 64 bytes.")
      .def_prop_ro("refused", &Codec::refused, "How many values had too many objects.")
      .def_prop_ro("most_objects", &Codec::most_objects, "The most objects that a decoded value has had.")
      .def(
          "register",
          [](Codec& self, nb::type_object type, std::uint64_t code, nb::object pack, nb::object unpack) {
            self.add_extension({std::move(type), code, std::move(pack), std::move(unpack)});
          },
          nb::arg("type"), nb::arg("code"), nb::arg("pack"), nb::arg("unpack"),
          "Register functions that encode and decode objects of exactly `type`.\n\n"
          "They are encoded as the plain value pack(object), and decoded as unpack(value). pack runs once for each\n"
          "object, after the rest of the message has been encoded. Raises ValueError if the type or the code is\n"
          "taken.")
      .def("encode", &encode, nb::arg("object").none(),
           nb::sig("def encode(self, object: object) -> tuple[bytes, list[tuple[int, int, object]]] | None"),
           "Return body and segments of `object`, or None if it is not encodable.\n\n"
           "A segment is (address, size in bytes, owner). Also None if encoding would lose shared identity: a\n"
           "container met twice, tensors over the same memory. The memory of a segment must not be read after its\n"
           "owner is dropped. Errors of pack are passed on.")
      .def("encode_recorded", &encode_recorded, nb::arg("object").none(),
           nb::sig("def encode_recorded(self, object: object) -> "
                   "tuple[bytes, list[tuple[int, int, object]], list[object]] | None"),
           "Encode like `encode`; also return the tensors that require grad.\n\n"
           "They are in the order of `decode`. Objects of exactly `parameter_type` that require grad are encoded as\n"
           "such tensors.")
      .def("decode", &decode, nb::arg("body"), nb::arg("segments"), nb::arg("wrap") = nb::none(),
           nb::sig("def decode(self, body: bytes | bytearray | memoryview, segments: collections.abc.Sequence[object], "
                   "wrap: collections.abc.Callable[..., collections.abc.Sequence[object]] "
                   "| None = None) -> object"),
           "Return the object that was given to `encode`.\n\n"
           "Segments are writable buffers; tensors use their memory.\n\n"
           "With `wrap`, tensors that require grad are created without it and passed to wrap(list) in one list,\n"
           "unless there are none; the tensors that it returns are used instead.\n\n"
           "Raises CodecError if body and segments are malformed; errors of unpack are passed on.");
}

}  // namespace telegrad::codec

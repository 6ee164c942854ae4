#include "codec/codec.h"

#include "codec/decoder.h"
#include "codec/encoder.h"

namespace telegrad::codec {

bool Encoded::needs_versions() const {
  std::uint64_t size = static_cast<std::uint64_t>(PyBytes_GET_SIZE(body.ptr()));
  for (const Segment& s : segments) size += s.nbytes;
  return size >= kMinVersioned;
}

EncodeStatus Codec::encode(PyObject* object, Encoded& out) const {
  return Encoder(*this, Mode::kFull).run(object, out);
}

EncodeStatus Codec::encode_basic(PyObject* object, Encoded& out) const {
  return Encoder(*this, Mode::kBasic).run(object, out);
}

EncodeStatus Codec::encode_recorded(PyObject* object, Encoded& out, bool extensions) const {
  return Encoder(*this, extensions ? Mode::kRecorded : Mode::kBasicRecorded).run(object, out);
}

PyObject* Codec::decode(std::string_view body, std::span<SegmentMemory> segments, PyObject* wrap) const {
  return Decoder(*this, body, segments, wrap).run();
}

void Codec::add_extension(Extension extension) {
  PyObject* type = extension.type.ptr();
  for (PyTypeObject* builtin : {&PyUnicode_Type, &PyLong_Type, &PyTuple_Type, &PyFloat_Type, &PyDict_Type, &PyList_Type,
                                Py_TYPE(Py_None), &PyBool_Type, &PyBytes_Type, &PyComplex_Type})
    if (type == reinterpret_cast<PyObject*>(builtin)) throw nb::value_error("the codec encodes this type itself");
  for (const Extension& known : extensions_) {
    if (known.type.ptr() == type) throw nb::value_error("this type is registered already");
    if (known.code == extension.code) throw nb::value_error("another type is registered with this code");
  }
  extensions_.push_back(std::move(extension));
}

const Extension* Codec::extension_of(const PyObject* object) const {
  const auto* type = reinterpret_cast<const PyObject*>(Py_TYPE(object));
  for (const Extension& known : extensions_)
    if (known.type.ptr() == type) return &known;
  return nullptr;
}

const Extension* Codec::extension_of_code(std::uint64_t code) const {
  for (const Extension& known : extensions_)
    if (known.code == code) return &known;
  return nullptr;
}

int Codec::traverse(visitproc visit, void* arg) const {
  for (const Extension& known : extensions_) {
    Py_VISIT(known.type.ptr());
    Py_VISIT(known.pack.ptr());
    Py_VISIT(known.unpack.ptr());
  }
  Py_VISIT(too_many_.ptr());
  return tensors_.traverse(visit, arg);
}

void Codec::clear() {
  // Moved out first: dropping a callable may run code that uses this codec.
  const std::vector<Extension> gone = std::move(extensions_);
  extensions_.clear();
  too_many_.reset();
  tensors_.clear();
}

PyObject* codec_error() {
  static PyObject* const type = PyErr_NewExceptionWithDoc(
      "telegrad._core.CodecError", "The bytes of a message are malformed.", PyExc_ValueError, nullptr);
  return type;
}

}  // namespace telegrad::codec

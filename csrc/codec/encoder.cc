#include "codec/encoder.h"

#include <algorithm>
#include <utility>

#include "codec/gil.h"

namespace telegrad::codec {
namespace {

// Long strings and bytes objects are tracked: met twice, they would be sent twice, which pickle avoids.
constexpr Py_ssize_t kLong = 1024;

constexpr std::uint64_t zigzag(std::int64_t v) {
  return (static_cast<std::uint64_t>(v) << 1) ^ static_cast<std::uint64_t>(v >> 63);
}

// Short tuples of numbers (sizes, coordinates) are often one constant that is used everywhere. They are sent again each
// time, which costs little, and the copies are equal.
bool is_small_record(PyObject* tuple) {
  const Py_ssize_t n = PyTuple_GET_SIZE(tuple);
  if (n > 8) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* o = PyTuple_GET_ITEM(tuple, i);
    if (!PyLong_CheckExact(o) && !PyFloat_CheckExact(o) && !PyBool_Check(o) && o != Py_None) return false;
  }
  return true;
}

EncodeStatus changed_size(const char* what) {
  PyErr_Format(PyExc_RuntimeError, "%s changed size while it was encoded", what);
  return EncodeStatus::kError;
}

}  // namespace

EncodeStatus Encoder::run(PyObject* root, Encoded& out) {
  if (const EncodeStatus status = value(root, 1); status != EncodeStatus::kOk) return status;
  if (is_basic() && !slots_.empty()) return EncodeStatus::kNotPlain;
  if (tensors_.size() == 0 && slots_.empty()) {
    main_.byte(kNoTables);
  } else {
    if (tensors_overlap()) return EncodeStatus::kNotPlain;
    if (const EncodeStatus status = tables(); status != EncodeStatus::kOk) return status;
  }
  out.body = nb::steal(main_.take());
  if (!out.body) return EncodeStatus::kError;
  out.segments = std::move(segments_);
  out.recorded = std::move(recorded_);
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::tables() {
  packing_ = true;
  const std::size_t segments_before = segments_.size();
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)  // packing may add slots
    if (slots_[slot].state == Packing::kPending)
      if (const EncodeStatus status = pack(slot, 1); status != EncodeStatus::kOk) return status;
  if (segments_.size() != segments_before && tensors_overlap()) {
    PyErr_SetString(PyExc_TypeError, "a packed value shares tensor memory with the rest of the message");
    return EncodeStatus::kError;
  }
  const std::uint64_t offset = main_.size();
  main_.varint(tensors_.size());
  main_.raw(tensor_table_.data(), tensor_table_.size());
  main_.varint(slots_.size());
  main_.raw(extension_table_.data(), extension_table_.size());
  main_.number(offset);
  main_.byte(kHasTables);
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::value(PyObject* o, int depth) {
  const PyTypeObject* type = Py_TYPE(o);
  if (type == &PyUnicode_Type) return string(o);
  if (type == &PyLong_Type) return integer(o);
  if (type == &PyTuple_Type) return tuple(o, depth);
  if (codec_.tensors().is_tensor(o)) return tensor(o);
  if (type == &PyFloat_Type) {
    out_->byte(kFloat);
    out_->number(PyFloat_AS_DOUBLE(o));
    return EncodeStatus::kOk;
  }
  if (type == &PyDict_Type) return dict(o, depth);
  if (type == &PyList_Type) return list(o, depth);
  if (o == Py_None) return out_->byte(kNone), EncodeStatus::kOk;
  if (o == Py_True) return out_->byte(kTrue), EncodeStatus::kOk;
  if (o == Py_False) return out_->byte(kFalse), EncodeStatus::kOk;
  if (type == &PyBytes_Type) return bytes(o);
  if (type == &PyComplex_Type) {
    out_->byte(kComplex);
    out_->number(PyComplex_RealAsDouble(o));
    out_->number(PyComplex_ImagAsDouble(o));
    return EncodeStatus::kOk;
  }
  return other(o, depth);
}

EncodeStatus Encoder::integer(PyObject* o) {
  int overflow;
  const long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
  if (overflow) return big_integer(o);
  if (v >= 0 && static_cast<std::uint64_t>(v) < kFixInts) {
    out_->byte(static_cast<std::uint8_t>(v));
  } else {
    out_->byte(kInt);
    out_->varint(zigzag(v));
  }
  return EncodeStatus::kOk;
}

// Uses the methods of int, because this is rare and CPython's C functions for it differ between versions.
EncodeStatus Encoder::big_integer(PyObject* o) {
  nb::object bits = nb::steal(PyObject_CallMethod(o, "bit_length", nullptr));
  if (!bits) return EncodeStatus::kError;
  const Py_ssize_t length = PyLong_AsSsize_t(bits.ptr()) / 8 + 1;  // room for the sign bit
  nb::object to_bytes = nb::steal(PyObject_GetAttrString(o, "to_bytes"));
  nb::object args = nb::steal(Py_BuildValue("(ns)", length, "little"));
  nb::object kwargs = nb::steal(Py_BuildValue("{sO}", "signed", Py_True));
  if (!to_bytes || !args || !kwargs) return EncodeStatus::kError;
  nb::object raw = nb::steal(PyObject_Call(to_bytes.ptr(), args.ptr(), kwargs.ptr()));
  if (!raw) return EncodeStatus::kError;
  out_->byte(kBigInt);
  out_->varint(static_cast<std::uint64_t>(PyBytes_GET_SIZE(raw.ptr())));
  out_->raw(PyBytes_AS_STRING(raw.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(raw.ptr())));
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::string(PyObject* o) {
  const char* data;
  Py_ssize_t n;
  nb::object encoded;
  if (PyUnicode_IS_COMPACT_ASCII(o)) {
    data = static_cast<const char*>(PyUnicode_DATA(o));
    n = PyUnicode_GET_LENGTH(o);
  } else {
    // Not PyUnicode_AsUTF8AndSize, which would leave a copy attached to the caller's string.
    encoded = nb::steal(PyUnicode_AsUTF8String(o));
    if (!encoded) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return EncodeStatus::kError;
      PyErr_Clear();  // a lone surrogate: valid in a str, not in UTF-8
      return EncodeStatus::kNotPlain;
    }
    data = PyBytes_AS_STRING(encoded.ptr());
    n = PyBytes_GET_SIZE(encoded.ptr());
  }
  if (n >= kLong && !is_first_visit(o)) return EncodeStatus::kNotPlain;
  out_->counted(kFixStr, kFixStrs, kStr, static_cast<std::uint64_t>(n));
  out_->raw(data, static_cast<std::size_t>(n));
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::bytes(PyObject* o) {
  const Py_ssize_t n = PyBytes_GET_SIZE(o);
  if (n >= kLong && !is_first_visit(o)) return EncodeStatus::kNotPlain;
  out_->byte(kBytes);
  out_->varint(static_cast<std::uint64_t>(n));
  out_->raw(PyBytes_AS_STRING(o), static_cast<std::size_t>(n));
  return EncodeStatus::kOk;
}

// An object with one reference cannot be met twice.
bool Encoder::is_first_visit(PyObject* o) { return Py_REFCNT(o) == 1 || containers_.insert(o); }

EncodeStatus Encoder::tuple(PyObject* o, int depth) {
  if (depth > codec_.max_depth()) return EncodeStatus::kNotPlain;
  const Py_ssize_t n = PyTuple_GET_SIZE(o);
  if (n > 0 && !is_first_visit(o) && !is_small_record(o)) return EncodeStatus::kNotPlain;
  out_->counted(kFixTuple, kFixTuples, kTuple, static_cast<std::uint64_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i)
    if (const EncodeStatus status = value(PyTuple_GET_ITEM(o, i), depth + 1); status != EncodeStatus::kOk)
      return status;
  return EncodeStatus::kOk;
}

// Describing a tensor may run Python code that changes the containers around it. So references are held, and sizes are
// checked again.
EncodeStatus Encoder::list(PyObject* o, int depth) {
  if (depth > codec_.max_depth() || !is_first_visit(o)) return EncodeStatus::kNotPlain;
  const Py_ssize_t n = PyList_GET_SIZE(o);
  out_->counted(kFixList, kFixLists, kList, static_cast<std::uint64_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (PyList_GET_SIZE(o) != n) return changed_size("list");
    const nb::object item = nb::borrow(PyList_GET_ITEM(o, i));
    if (const EncodeStatus status = value(item.ptr(), depth + 1); status != EncodeStatus::kOk) return status;
  }
  return PyList_GET_SIZE(o) == n ? EncodeStatus::kOk : changed_size("list");
}

EncodeStatus Encoder::dict(PyObject* o, int depth) {
  if (depth > codec_.max_depth() || !is_first_visit(o)) return EncodeStatus::kNotPlain;
  const Py_ssize_t n = PyDict_GET_SIZE(o);
  out_->counted(kFixDict, kFixDicts, kDict, static_cast<std::uint64_t>(n));
  Py_ssize_t at = 0, written = 0;
  PyObject *next_key, *next_item;
  while (PyDict_Next(o, &at, &next_key, &next_item)) {
    const nb::object key = nb::borrow(next_key), item = nb::borrow(next_item);
    if (const EncodeStatus status = value(key.ptr(), depth + 1); status != EncodeStatus::kOk) return status;
    if (const EncodeStatus status = value(item.ptr(), depth + 1); status != EncodeStatus::kOk) return status;
    if (PyDict_GET_SIZE(o) != n || ++written > n) return changed_size("dict");
  }
  return written == n ? EncodeStatus::kOk : changed_size("dict");
}

EncodeStatus Encoder::tensor(PyObject* o) {
  std::size_t number = tensors_.find(o);
  if (number == PointerIndex::kAbsent) {
    TensorSpec spec;
    Segment segment;
    if (const EncodeStatus status = codec_.tensors().describe(o, spec, segment); status != EncodeStatus::kOk)
      return status;
    for (int i = 0; i < spec.ndim; ++i)
      if (spec.shape[i] < 0 || spec.strides[i] < 0) return EncodeStatus::kNotPlain;
    if (is_recorded()) {
      if (spec.requires_grad)
        recorded_.push_back(nb::borrow(o));
      else if (!codec_.tensors().is_tensor(o))
        return EncodeStatus::kNotPlain;  // a parameter that does not require grad must arrive as a parameter
    }
    number = tensors_.size();
    tensors_.add(o);
    alive_.push_back(nb::borrow(o));
    int graph_cut = 0;
    if (spec.requires_grad && !is_recorded() && (graph_cut = codec_.tensors().has_graph(o)) < 0)
      return EncodeStatus::kError;
    const bool is_strided = !spec.is_contiguous();
    tensor_table_.byte(spec.dtype->code);
    tensor_table_.byte(static_cast<std::uint8_t>((spec.requires_grad ? kRequiresGrad : 0) |
                                                 (is_strided ? kStrided : 0) | (segment.nbytes ? kHasMemory : 0) |
                                                 (graph_cut ? kGraphCut : 0)));
    tensor_table_.varint(static_cast<std::uint64_t>(spec.ndim));
    for (int i = 0; i < spec.ndim; ++i) tensor_table_.varint(static_cast<std::uint64_t>(spec.shape[i]));
    if (is_strided)
      for (int i = 0; i < spec.ndim; ++i) tensor_table_.varint(static_cast<std::uint64_t>(spec.strides[i]));
    if (segment.nbytes) {
      segment.tensor = nb::borrow(o);
      segment.requires_grad = spec.requires_grad;
      segments_.push_back(std::move(segment));
    }
  }
  out_->counted(kFixTensorRef, kFixTensorRefs, kTensorRef, number);
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::other(PyObject* o, int depth) {
  if (!codec_.extension_of(o)) {
    if (is_recorded() && codec_.tensors().is_parameter(o)) return tensor(o);
    if (!packing_) return EncodeStatus::kNotPlain;
    PyErr_Format(PyExc_TypeError, "a packed value holds %.200s, which is not a plain value", Py_TYPE(o)->tp_name);
    return EncodeStatus::kError;
  }
  std::size_t slot = extensions_.find(o);
  if (slot == PointerIndex::kAbsent) {
    slot = slots_.size();
    extensions_.add(o);
    slots_.push_back({nb::borrow(o)});
  }
  // A packed value must follow its dependencies in the table.
  if (packing_)
    if (const EncodeStatus status = pack(slot, depth + 1); status != EncodeStatus::kOk) return status;
  out_->counted(kFixExtensionRef, kFixExtensionRefs, kExtensionRef, slot);
  return EncodeStatus::kOk;
}

EncodeStatus Encoder::pack(std::size_t slot, int depth) {
  if (slots_[slot].state == Packing::kDone) return EncodeStatus::kOk;
  if (slots_[slot].state == Packing::kRunning || depth > codec_.max_depth()) {
    PyErr_SetString(PyExc_TypeError, "packed values refer to each other in a circle");
    return EncodeStatus::kError;
  }
  slots_[slot].state = Packing::kRunning;
  nb::object object = slots_[slot].object;
  const Extension extension = *codec_.extension_of(object.ptr());
  nb::object packed = nb::steal(call_python(extension.pack.ptr(), object.ptr()));
  if (!packed) return EncodeStatus::kError;
  alive_.push_back(packed);

  Writer own;
  Writer* const outer = std::exchange(out_, &own);
  const EncodeStatus status = value(packed.ptr(), depth + 1);
  out_ = outer;
  if (status == EncodeStatus::kNotPlain) {
    PyErr_Format(PyExc_TypeError, "%.200s was packed into a value that is not plain", Py_TYPE(object.ptr())->tp_name);
    return EncodeStatus::kError;
  }
  if (status != EncodeStatus::kOk) return status;
  extension_table_.varint(slot);
  extension_table_.varint(extension.code);
  extension_table_.raw(own.data(), own.size());
  slots_[slot].state = Packing::kDone;
  return EncodeStatus::kOk;
}

bool Encoder::tensors_overlap() const {
  if (segments_.size() < 2) return false;
  std::vector<std::pair<std::uintptr_t, std::size_t>> spans;
  spans.reserve(segments_.size());
  for (const Segment& s : segments_) spans.emplace_back(s.address, s.nbytes);
  std::ranges::sort(spans);
  for (std::size_t i = 1; i < spans.size(); ++i)
    if (spans[i].first - spans[i - 1].first < spans[i - 1].second) return true;
  return false;
}

}  // namespace telegrad::codec

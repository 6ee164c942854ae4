#include "codec/decoder.h"

#include "codec/gil.h"

namespace telegrad::codec {
namespace {

std::nullptr_t malformed(const char* what) {
  PyErr_Format(codec_error(), "malformed message: %s", what);
  return nullptr;
}

bool is_malformed(const char* what) { return malformed(what), false; }

constexpr std::int64_t unzigzag(std::uint64_t v) {
  return static_cast<std::int64_t>(v >> 1) ^ -static_cast<std::int64_t>(v & 1);
}

constexpr const char* kCut = "it ends too early";

bool sizes(Reader& in, int n, std::int64_t* out) {
  for (int i = 0; i < n; ++i) {
    std::uint64_t v;
    if (!in.varint(v)) return is_malformed(kCut);
    if (v > INT64_MAX) return is_malformed("a tensor of more than 63 bits");
    out[i] = static_cast<std::int64_t>(v);
  }
  return true;
}

}  // namespace

PyObject* Decoder::run() {
  if (body_.empty()) return malformed("it is empty");
  std::string_view main = body_.substr(0, body_.size() - 1);
  const auto footer = static_cast<std::uint8_t>(body_.back());
  if (footer == kHasTables) {
    std::uint64_t offset;
    if (main.size() < sizeof offset) return malformed(kCut);
    const std::size_t end = main.size() - sizeof offset;
    Reader(main.data() + end, sizeof offset).number(offset);
    if (offset > end) return malformed("its tables are outside the body");
    if (!tables(Reader(main.data() + offset, end - offset))) return nullptr;
    main = main.substr(0, offset);
  } else if (footer != kNoTables) {
    return malformed("unknown footer");
  }
  if (segments_used_ != segments_.size()) return malformed("it has more segments than tensors");

  Reader in(main.data(), main.size());
  nb::object result = nb::steal(value(in, 1));
  if (!result) return nullptr;
  if (in.left()) return malformed("it has bytes after its end");
  codec_.count_objects(objects_);
  return result.release().ptr();
}

/// Sets the error for too many objects. Returns false.
bool Decoder::refuse_objects() {
  codec_.count_refused();
  const nb::object args = nb::steal(
      Py_BuildValue("(sN)", "max_objects",
                    PyUnicode_FromFormat("max_objects: a message has more than %llu objects. Send its data as tensors "
                                         "or arrays, or in parts, or raise the option at the receiver.",
                                         static_cast<unsigned long long>(codec_.max_objects()))));
  if (args) PyErr_SetObject(codec_.too_many().ptr(), args.ptr());
  return false;
}

bool Decoder::tables(Reader in) {
  std::uint64_t count;
  if (!in.varint(count)) return is_malformed(kCut);
  if (count > in.left() / kMinTensorBytes) return is_malformed("a count beyond its size");
  tensors_.reserve(count);
  if (!count_objects(count * kObjectsPerTensor)) return false;
  while (count--)
    if (!tensor(in)) return false;
  if (!to_wrap_.empty() && !wrap()) return false;

  if (!in.varint(count)) return is_malformed(kCut);
  if (count > in.left() / kMinExtensionBytes) return is_malformed("a count beyond its size");
  if (!count_objects(count)) return false;
  extensions_.resize(count);
  while (count--)
    if (!extension(in)) return false;
  return in.left() == 0 || is_malformed("its tables have bytes after their end");
}

bool Decoder::tensor(Reader& in) {
  std::uint8_t code, flags;
  std::uint64_t ndim;
  if (!in.byte(code) || !in.byte(flags) || !in.varint(ndim)) return is_malformed(kCut);
  TensorSpec spec;
  spec.dtype = dtype_of_code(code);
  if (!spec.dtype) return is_malformed("a tensor of unknown type");
  if (flags & ~kAllTensorFlags) return is_malformed("unknown flags of a tensor");
  spec.requires_grad = flags & kRequiresGrad;
  spec.graph_cut = flags & kGraphCut;
  if (spec.requires_grad && !spec.dtype->can_require_grad) return is_malformed("an integer tensor that requires grad");
  if (ndim > kMaxTensorDims) return is_malformed("a tensor of too many dimensions");
  spec.ndim = static_cast<int>(ndim);
  if (!sizes(in, spec.ndim, spec.shape)) return false;
  if (flags & kStrided) {
    if (!sizes(in, spec.ndim, spec.strides)) return false;
  } else if (!spec.set_contiguous()) {
    return is_malformed("a tensor of more than 63 bits");
  }
  std::int64_t numel, span;
  if (!spec.measure(numel, span)) return is_malformed("a tensor of more than 63 bits");

  SegmentMemory memory;
  if (((flags & kHasMemory) != 0) != (span > 0))
    return is_malformed("a tensor with a size that differs from its memory");
  if (span > 0) {
    if (segments_used_ == segments_.size()) return is_malformed("it has fewer segments than tensors");

    memory = std::move(segments_[segments_used_++]);
    if (memory.size() < static_cast<std::uint64_t>(span)) return is_malformed("a tensor larger than its segment");
    const std::size_t alignment = spec.dtype->size() < 8 ? spec.dtype->size() : 8;
    if (reinterpret_cast<std::uintptr_t>(memory.data()) % alignment) return is_malformed("a misaligned segment");
  }
  if (wrap_ && spec.requires_grad) {
    spec.requires_grad = false;
    to_wrap_.push_back(tensors_.size());
  }
  nb::object made = nb::steal(codec_.tensors().rebuild(spec, std::move(memory)));
  if (!made) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError) ||
        PyErr_ExceptionMatches(PyExc_ValueError))
      nb::chain_error(codec_error(), "this torch cannot make a tensor of type %s", spec.dtype->name);
    return false;
  }
  tensors_.push_back(std::move(made));
  return true;
}

bool Decoder::wrap() {
  const auto n = static_cast<Py_ssize_t>(to_wrap_.size());
  nb::object list = nb::steal(PyList_New(n));
  if (!list) return false;
  for (Py_ssize_t i = 0; i < n; ++i)
    PyList_SET_ITEM(list.ptr(), i, tensors_[to_wrap_[static_cast<std::size_t>(i)]].release().ptr());
  nb::object wrapped = nb::steal(call_python(wrap_, list.ptr()));
  if (!wrapped) return false;
  wrapped = nb::steal(PySequence_Tuple(wrapped.ptr()));
  if (!wrapped) return false;
  if (PyTuple_GET_SIZE(wrapped.ptr()) != n) {
    PyErr_SetString(PyExc_ValueError, "wrap returned a different number of tensors than it was given");
    return false;
  }
  for (Py_ssize_t i = 0; i < n; ++i)
    tensors_[to_wrap_[static_cast<std::size_t>(i)]] = nb::borrow(PyTuple_GET_ITEM(wrapped.ptr(), i));
  return true;
}

bool Decoder::extension(Reader& in) {
  std::uint64_t slot, code;
  if (!in.varint(slot) || !in.varint(code)) return is_malformed(kCut);
  if (slot >= extensions_.size() || extensions_[slot]) return is_malformed("an extension with an invalid slot");
  const Extension* known = codec_.extension_of_code(code);
  if (!known) {
    PyErr_Format(codec_error(), "malformed message: extension %llu is not registered at this worker",
                 static_cast<unsigned long long>(code));
    return false;
  }
  nb::object unpack = known->unpack;  // a copy: unpacking may register another extension
  nb::object packed = nb::steal(value(in, 1));
  if (!packed) return false;
  extensions_[slot] = nb::steal(call_python(unpack.ptr(), packed.ptr()));
  return static_cast<bool>(extensions_[slot]);
}

PyObject* Decoder::value(Reader& in, int depth) {
  std::uint8_t tag;
  if (!in.byte(tag)) return malformed(kCut);
  if (tag < kFixTuple) return PyLong_FromLong(tag - kFixInt);
  if (tag < kFixList) return sequence(in, tag - kFixTuple, depth, true);
  if (tag < kFixStr) return sequence(in, tag - kFixList, depth, false);
  if (tag < kNone) return string(in, tag - kFixStr);
  if (tag >= kFixDict && tag < kFixDict + kFixDicts) return dict(in, tag - kFixDict, depth);
  if (tag >= kFixTensorRef && tag < kFixTensorRef + kFixTensorRefs) return reference(tensors_, tag - kFixTensorRef);
  if (tag >= kFixExtensionRef && tag < kFixExtensionRef + kFixExtensionRefs)
    return reference(extensions_, tag - kFixExtensionRef);

  std::uint64_t n;
  double real, imaginary;
  switch (tag) {
    case kNone:
      return Py_NewRef(Py_None);
    case kFalse:
      return Py_NewRef(Py_False);
    case kTrue:
      return Py_NewRef(Py_True);
    case kFloat:
      return in.number(real) ? PyFloat_FromDouble(real) : malformed(kCut);
    case kComplex:
      return in.number(real) && in.number(imaginary) ? PyComplex_FromDoubles(real, imaginary) : malformed(kCut);
    case kBigInt:
      return big_integer(in);
    case kInt:
      return in.varint(n) ? PyLong_FromLongLong(unzigzag(n)) : malformed(kCut);
    case kStr:
      return in.varint(n) ? string(in, n) : malformed(kCut);
    case kBytes: {
      if (!in.varint(n)) return malformed(kCut);
      const char* at = in.raw(n);
      return at ? PyBytes_FromStringAndSize(at, static_cast<Py_ssize_t>(n)) : malformed(kCut);
    }
    case kTuple:
      return in.varint(n) ? sequence(in, n, depth, true) : malformed(kCut);
    case kList:
      return in.varint(n) ? sequence(in, n, depth, false) : malformed(kCut);
    case kDict:
      return in.varint(n) ? dict(in, n, depth) : malformed(kCut);
    case kTensorRef:
      return in.varint(n) ? reference(tensors_, n) : malformed(kCut);
    case kExtensionRef:
      return in.varint(n) ? reference(extensions_, n) : malformed(kCut);
    default:
      return malformed("unknown tag");
  }
}

PyObject* Decoder::sequence(Reader& in, std::uint64_t count, int depth, bool is_tuple) {
  if (depth > codec_.max_depth()) return malformed("it is nested too deeply");
  if (count > in.left() / kMinValueBytes) return malformed("a count beyond its size");
  if (!count_objects(count)) return nullptr;
  const auto n = static_cast<Py_ssize_t>(count);
  nb::object result = nb::steal(is_tuple ? PyTuple_New(n) : PyList_New(n));
  if (!result) return nullptr;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = value(in, depth + 1);
    if (!item) return nullptr;
    if (is_tuple)
      PyTuple_SET_ITEM(result.ptr(), i, item);
    else
      PyList_SET_ITEM(result.ptr(), i, item);
  }
  return result.release().ptr();
}

PyObject* Decoder::dict(Reader& in, std::uint64_t count, int depth) {
  if (depth > codec_.max_depth()) return malformed("it is nested too deeply");
  if (count > in.left() / (2 * kMinValueBytes)) return malformed("a count beyond its size");
  if (!count_objects(2 * count)) return nullptr;
  nb::object result = nb::steal(PyDict_New());
  if (!result) return nullptr;
  while (count--) {
    nb::object key = nb::steal(value(in, depth + 1));
    if (!key) return nullptr;
    nb::object item = nb::steal(value(in, depth + 1));
    if (!item) return nullptr;
    if (PyDict_SetItem(result.ptr(), key.ptr(), item.ptr()) < 0) {
      if (PyErr_ExceptionMatches(PyExc_TypeError))
        nb::chain_error(codec_error(), "malformed message: a key that cannot be hashed");
      return nullptr;
    }
  }
  return result.release().ptr();
}

PyObject* Decoder::string(Reader& in, std::uint64_t length) {
  const char* at = in.raw(length);
  if (!at) return malformed(kCut);
  PyObject* text = PyUnicode_DecodeUTF8(at, static_cast<Py_ssize_t>(length), nullptr);
  if (!text && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
    nb::chain_error(codec_error(), "malformed message: a string that is not UTF-8");
  return text;
}

PyObject* Decoder::big_integer(Reader& in) {
  std::uint64_t length;
  if (!in.varint(length)) return malformed(kCut);
  const char* at = in.raw(length);
  if (!at) return malformed(kCut);
  nb::object from_bytes = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyLong_Type), "from_bytes"));
  nb::object args =
      nb::steal(Py_BuildValue("(Ns)", PyBytes_FromStringAndSize(at, static_cast<Py_ssize_t>(length)), "little"));
  nb::object kwargs = nb::steal(Py_BuildValue("{sO}", "signed", Py_True));
  if (!from_bytes || !args || !kwargs) return nullptr;
  return PyObject_Call(from_bytes.ptr(), args.ptr(), kwargs.ptr());
}

PyObject* Decoder::reference(const std::vector<nb::object>& table, std::uint64_t number) {
  if (number >= table.size() || !table[number]) return malformed("a reference to a missing table entry");
  return Py_NewRef(table[number].ptr());
}

}  // namespace telegrad::codec

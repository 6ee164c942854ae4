#include "codec/tensor.h"

#include <cstdlib>
#include <new>

#include "codec/gil.h"

namespace telegrad::codec {
namespace {

// Owner of a tensor over received memory. One allocation: the sizes follow the struct.
struct TensorOwner {
  dlpack::ManagedTensor managed;
  SegmentMemory memory;
  bool* deleted;  // set by the deleter while the tensor is created, to decide which side cleans up after a failure

  static TensorOwner* make(int ndim) {
    void* room = std::malloc(sizeof(TensorOwner) + 2 * sizeof(std::int64_t) * static_cast<std::size_t>(ndim));
    if (!room) throw std::bad_alloc();
    return new (room) TensorOwner{};
  }

  std::int64_t* sizes() { return reinterpret_cast<std::int64_t*>(this + 1); }

  static void destroy(dlpack::ManagedTensor* managed) {
    auto* self = static_cast<TensorOwner*>(managed->context);
    if (self->deleted) *self->deleted = true;
    self->~TensorOwner();
    std::free(self);
  }
};
static_assert(alignof(TensorOwner) >= alignof(std::int64_t));

// Up to this size a tensor with holes is sent with them and keeps its strides, as in torch.
constexpr std::int64_t kSmallSpan = 8 << 10;

// A tensor without elements still needs an address.
alignas(64) std::byte nothing[64];

/// Leaves a tensor to the Python hook, which decides about it or raises the error of the fast path again.
EncodeStatus leave_to_hook(bool& unsure) {
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return EncodeStatus::kError;
    PyErr_Clear();
  }
  unsure = true;
  return EncodeStatus::kNotPlain;
}

}  // namespace

bool TensorSpec::measure(std::int64_t& numel, std::int64_t& span) const {
  const auto item = static_cast<std::int64_t>(dtype->size());
  std::int64_t count = 1, last = 0;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) {
      numel = span = 0;
      return true;
    }
  }
  for (int i = 0; i < ndim; ++i) {
    std::int64_t reach;
    if (__builtin_mul_overflow(count, shape[i], &count) || __builtin_mul_overflow(shape[i] - 1, strides[i], &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return false;
  }
  std::int64_t bytes;
  if (__builtin_mul_overflow(count, item, &bytes) || __builtin_add_overflow(last, 1, &span) ||
      __builtin_mul_overflow(span, item, &span))
    return false;
  numel = count;
  return true;
}

bool TensorSpec::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = ndim; i-- > 0;) {
    if (strides[i] != expected) return false;
    if (__builtin_mul_overflow(expected, shape[i] > 1 ? shape[i] : 1, &expected)) return false;
  }
  return true;
}

bool TensorSpec::set_contiguous() {
  std::int64_t stride = 1;
  for (int i = ndim; i-- > 0;) {
    strides[i] = stride;
    if (__builtin_mul_overflow(stride, shape[i] > 1 ? shape[i] : 1, &stride)) return false;
  }
  return true;
}

nb::object versioned_owner(const Segment& segment) {
  nb::object tensor = segment.tensor;
  if (segment.requires_grad) {
    static PyObject* const detach = PyUnicode_InternFromString("detach");
    tensor = nb::steal(in_python([&] { return PyObject_CallMethodNoArgs(segment.tensor.ptr(), detach); }));
    if (!tensor.is_valid()) {
      if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
      PyErr_Clear();
      return segment.owner;
    }
  }
  PyObject* both = PyTuple_Pack(2, segment.owner.ptr(), tensor.ptr());
  if (!both) throw nb::python_error();
  return nb::steal(both);
}

TensorBridge::TensorBridge(nb::type_object tensor_type, nb::object exchange_api, nb::object encode, nb::object decode,
                           nb::tuple byte_types, nb::object parameter_type, nb::object watch_cut, nb::object is_watched,
                           nb::object forward_ad)
    : type_object_(std::move(tensor_type)),
      type_(reinterpret_cast<PyTypeObject*>(type_object_.ptr())),
      encode_(std::move(encode)),
      decode_(std::move(decode)),
      byte_types_(std::move(byte_types)),
      parameter_type_(std::move(parameter_type)),
      watch_cut_(std::move(watch_cut)),
      is_watched_(std::move(is_watched)),
      forward_ad_(std::move(forward_ad)),
      no_level_(nb::steal(PyLong_FromLong(-1))),
      requires_grad_(nb::steal<nb::str>(PyUnicode_InternFromString("requires_grad"))),
      is_leaf_(nb::steal<nb::str>(PyUnicode_InternFromString("is_leaf"))),
      leaf_hooks_(nb::steal<nb::str>(PyUnicode_InternFromString("_post_accumulate_grad_hooks"))),
      dtype_(nb::steal<nb::str>(PyUnicode_InternFromString("dtype"))),
      current_level_(nb::steal<nb::str>(PyUnicode_InternFromString("_current_level"))) {
  if (exchange_api.is_none()) return;
  auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), dlpack::kExchangeApiCapsule));
  if (!api) throw nb::python_error();
  while (api && api->version.major != dlpack::kMajorVersion) api = api->older;
  if (!api || !api->view_of_object || !api->managed_to_object) return;
  is_neg_ = TorchMethod(type_object_.attr("is_neg"));
  is_conj_ = TorchMethod(type_object_.attr("is_conj"));
  untyped_storage_ = TorchMethod(type_object_.attr("untyped_storage"));
  storage_type_ = nb::borrow(nb::object(type_object_().attr("untyped_storage")()).type());
  data_ptr_ = TorchMethod(storage_type_.attr("data_ptr"));
  api_ = api;
}

EncodeStatus TensorBridge::describe(PyObject* tensor, TensorSpec& spec, Segment& segment) const {
  if (api_ && !in_dual_level()) {
    bool unsure = false;
    const EncodeStatus status = describe_natively(tensor, spec, segment, unsure);
    if (!unsure) return status;
  }
  return describe_by_hook(tensor, spec, segment);
}

// Small integers are single objects, so the comparison of addresses is exact.
bool TensorBridge::in_dual_level() const {
  if (!PyDict_CheckExact(forward_ad_.ptr())) return false;
  PyObject* level = PyDict_GetItemWithError(forward_ad_.ptr(), current_level_.ptr());
  return level && level != no_level_.ptr();
}

bool TensorBridge::flag(const TorchMethod& method, PyObject* tensor, bool& out) const {
  PyObject* answer = method(tensor);
  if (!answer) return false;
  out = answer == Py_True;
  Py_DECREF(answer);
  return true;
}

// Reads the memory last, after its owner, without Python code in between: an earlier description may be of memory that
// has been freed.
bool TensorBridge::locate(PyObject* tensor, Located& out) const {
  out.storage = nb::steal(untyped_storage_(tensor));
  if (!out.storage.is_valid() || !Py_IS_TYPE(out.storage.ptr(), reinterpret_cast<PyTypeObject*>(storage_type_.ptr())))
    return false;
  const Py_ssize_t nbytes = in_python([&] { return PyObject_Size(out.storage.ptr()); });
  if (nbytes < 0) return false;
  const nb::object address = nb::steal(data_ptr_(out.storage.ptr()));
  if (!address.is_valid()) return false;
  out.begin = reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.ptr()));
  out.nbytes = static_cast<std::size_t>(nbytes);
  return api_->view_of_object(tensor, &out.view) == 0;
}

// In the calls below Python code may run, that of a torch function mode or of a thread that takes the GIL, and give the
// tensor other memory. So what is read of the memory comes from one `locate`, and must be within the owner.
EncodeStatus TensorBridge::describe_natively(PyObject* tensor, TensorSpec& spec, Segment& segment, bool& unsure) const {
  bool is_lazy = false;
  if (!flag(is_neg_, tensor, is_lazy)) return leave_to_hook(unsure);
  if (is_lazy) return EncodeStatus::kNotPlain;
  nb::object requires_grad = nb::steal(in_python([&] { return PyObject_GetAttr(tensor, requires_grad_.ptr()); }));
  if (!requires_grad.is_valid()) return leave_to_hook(unsure);
  spec.requires_grad = requires_grad.ptr() == Py_True;

  Located found;
  const dlpack::Tensor& view = found.view;
  for (spec.dtype = nullptr;;) {
    if (!locate(tensor, found)) return leave_to_hook(unsure);
    if (view.device.type != dlpack::kCpu || view.ndim > kMaxTensorDims) return EncodeStatus::kNotPlain;
    if (view.ndim > 0 && (!view.shape || !view.strides)) return EncodeStatus::kNotPlain;
    const DType* const dtype = dtype_of_dlpack(view.dtype.code, view.dtype.bits, view.dtype.lanes);
    if (!dtype) return leave_to_hook(unsure);
    if (dtype == spec.dtype) break;
    if (spec.dtype) return leave_to_hook(unsure);  // changed in between
    spec.dtype = dtype;
    if (!dtype->is_complex() && !is_ambiguous_to_dlpack(*dtype)) break;
    if (dtype->is_complex()) {
      if (!flag(is_conj_, tensor, is_lazy)) return leave_to_hook(unsure);
      if (is_lazy) return EncodeStatus::kNotPlain;
    } else {
      nb::object exact = nb::steal(in_python([&] { return PyObject_GetAttr(tensor, dtype_.ptr()); }));
      if (!exact.is_valid()) return leave_to_hook(unsure);
      bool is_byte = false;
      for (nb::handle known : byte_types_) is_byte |= known.is(exact);
      if (!is_byte) return leave_to_hook(unsure);
    }
  }
  spec.ndim = view.ndim;
  for (int i = 0; i < view.ndim; ++i) {
    spec.shape[i] = view.shape[i];
    spec.strides[i] = view.strides[i];
  }
  std::int64_t numel, span;
  if (!spec.measure(numel, span)) return EncodeStatus::kNotPlain;
  const auto item = static_cast<std::int64_t>(spec.dtype->size());
  if (span / 2 > numel * item && span > kSmallSpan) return leave_to_hook(unsure);  // mostly holes: it copies densely
  segment = Segment{};
  if (span <= 0) return EncodeStatus::kOk;
  const auto address = reinterpret_cast<std::uintptr_t>(view.data) + view.byte_offset;
  const std::size_t offset = address - found.begin;
  // Memory of another storage, or a storage that is too small: the hook reads it again, or raises.
  if (address < found.begin || offset > found.nbytes || static_cast<std::size_t>(span) > found.nbytes - offset)
    return leave_to_hook(unsure);
  segment = Segment{address, static_cast<std::size_t>(span), std::move(found.storage)};
  return EncodeStatus::kOk;
}

// The hook returns None or (dtype code, requires_grad, shape, strides, address, nbytes, owner).
EncodeStatus TensorBridge::describe_by_hook(PyObject* tensor, TensorSpec& spec, Segment& segment) const {
  nb::object answer = nb::steal(call_python(encode_.ptr(), tensor));
  if (!answer) return EncodeStatus::kError;
  if (answer.is_none()) return EncodeStatus::kNotPlain;
  PyObject *shape, *strides, *owner;
  unsigned char code;
  int requires_grad;
  unsigned long long address;
  Py_ssize_t nbytes;
  if (!PyArg_ParseTuple(answer.ptr(), "bpO!O!KnO", &code, &requires_grad, &PyTuple_Type, &shape, &PyTuple_Type,
                        &strides, &address, &nbytes, &owner))
    return EncodeStatus::kError;
  spec.dtype = dtype_of_code(code);
  spec.requires_grad = requires_grad != 0;
  const Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
  if (ndim > kMaxTensorDims) return EncodeStatus::kNotPlain;
  spec.ndim = static_cast<int>(ndim);
  bool is_sane = spec.dtype && PyTuple_GET_SIZE(strides) == ndim;
  for (Py_ssize_t i = 0; is_sane && i < ndim; ++i) {
    spec.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    spec.strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
    if (PyErr_Occurred()) return EncodeStatus::kError;
    is_sane = spec.shape[i] >= 0 && spec.strides[i] >= 0;
  }
  std::int64_t numel, span;
  if (!is_sane || !spec.measure(numel, span) || span != nbytes) {
    PyErr_SetString(PyExc_ValueError, "encode_tensor returned an invalid description of a tensor");
    return EncodeStatus::kError;
  }
  segment = Segment{};
  if (span > 0)
    segment = Segment{static_cast<std::uintptr_t>(address), static_cast<std::size_t>(nbytes), nb::borrow(owner)};
  return EncodeStatus::kOk;
}

int TensorBridge::has_graph(PyObject* tensor) const {
  const nb::object is_leaf = nb::steal(PyObject_GetAttr(tensor, is_leaf_.ptr()));
  if (!is_leaf.is_valid()) return -1;
  if (is_leaf.ptr() == Py_False) return 1;
  if (is_watched_.is_none()) return 0;
  const nb::object hooks = nb::steal(PyObject_GetAttr(tensor, leaf_hooks_.ptr()));
  if (!hooks.is_valid()) return -1;
  if (hooks.is_none()) return 0;
  const nb::object watched = nb::steal(PyObject_CallOneArg(is_watched_.ptr(), tensor));
  return watched.is_valid() ? watched.ptr() == Py_True : -1;
}

PyObject* TensorBridge::rebuild(const TensorSpec& spec, SegmentMemory memory) const {
  nb::object tensor = nb::steal(rebuild_plain(spec, std::move(memory)));
  if (tensor.is_valid() && spec.requires_grad && spec.graph_cut && !watch_cut_.is_none()) {
    const nb::object watched = nb::steal(PyObject_CallOneArg(watch_cut_.ptr(), tensor.ptr()));
    if (!watched.is_valid()) return nullptr;
  }
  return tensor.release().ptr();
}

PyObject* TensorBridge::rebuild_plain(const TensorSpec& spec, SegmentMemory memory) const {
  if (api_) {
    const bool had_memory = memory.valid();
    if (PyObject* tensor = rebuild_natively(spec, memory)) return tensor;
    if (!PyErr_ExceptionMatches(PyExc_Exception) || memory.valid() != had_memory) return nullptr;
    PyErr_Clear();  // an element type of this torch that its DLPack does not support
  }
  return rebuild_by_hook(spec, std::move(memory));
}

PyObject* TensorBridge::rebuild_natively(const TensorSpec& spec, SegmentMemory& memory) const {
  TensorOwner* tensor_owner = TensorOwner::make(spec.ndim);
  std::int64_t* shape = tensor_owner->sizes();
  std::int64_t* strides = shape + spec.ndim;
  for (int i = 0; i < spec.ndim; ++i) {
    shape[i] = spec.shape[i];
    strides[i] = spec.strides[i];
  }
  tensor_owner->memory = std::move(memory);
  bool deleted = false;
  tensor_owner->deleted = &deleted;
  void* data = tensor_owner->memory.valid() ? tensor_owner->memory.data() : nothing;
  tensor_owner->managed = {
      .version = {dlpack::kMajorVersion, 0},
      .context = tensor_owner,
      .deleter = TensorOwner::destroy,
      .flags = 0,
      .tensor = {data, {dlpack::kCpu, 0}, spec.ndim, {spec.dtype->dl_code, spec.dtype->bits, 1}, shape, strides, 0},
  };
  void* made = nullptr;
  const int failed = api_->managed_to_object(&tensor_owner->managed, &made);
  if (failed || !made) {
    if (!deleted) {
      memory = std::move(tensor_owner->memory);
      TensorOwner::destroy(&tensor_owner->managed);
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no tensor from the received memory");
    return nullptr;
  }
  tensor_owner->deleted = nullptr;
  nb::object tensor = nb::steal(static_cast<PyObject*>(made));
  if (spec.requires_grad && PyObject_SetAttr(tensor.ptr(), requires_grad_.ptr(), Py_True) < 0) return nullptr;
  return tensor.release().ptr();
}

PyObject* TensorBridge::rebuild_by_hook(const TensorSpec& spec, SegmentMemory memory) const {
  nb::object shape = nb::steal(PyTuple_New(spec.ndim)), strides = nb::steal(PyTuple_New(spec.ndim));
  if (!shape || !strides) return nullptr;
  for (int i = 0; i < spec.ndim; ++i) {
    PyObject* size = PyLong_FromLongLong(spec.shape[i]);
    PyObject* stride = PyLong_FromLongLong(spec.strides[i]);
    PyTuple_SET_ITEM(shape.ptr(), i, size);
    PyTuple_SET_ITEM(strides.ptr(), i, stride);
    if (!size || !stride) return nullptr;
  }
  nb::object buffer = memory.valid() ? as_buffer(std::move(memory)) : nb::none();
  return in_python([&] {
    return PyObject_CallFunction(decode_.ptr(), "(BOOO)O", spec.dtype->code, spec.requires_grad ? Py_True : Py_False,
                                 shape.ptr(), strides.ptr(), buffer.ptr());
  });
}

int TensorBridge::traverse(visitproc visit, void* arg) const {
  Py_VISIT(type_object_.ptr());
  Py_VISIT(encode_.ptr());
  Py_VISIT(decode_.ptr());
  Py_VISIT(byte_types_.ptr());
  Py_VISIT(parameter_type_.ptr());
  Py_VISIT(watch_cut_.ptr());
  Py_VISIT(is_watched_.ptr());
  Py_VISIT(forward_ad_.ptr());
  Py_VISIT(is_neg_.ptr());
  Py_VISIT(is_conj_.ptr());
  Py_VISIT(untyped_storage_.ptr());
  Py_VISIT(storage_type_.ptr());
  Py_VISIT(data_ptr_.ptr());
  return 0;
}

void TensorBridge::clear() {
  encode_ = nb::object();
  decode_ = nb::object();
}

}  // namespace telegrad::codec

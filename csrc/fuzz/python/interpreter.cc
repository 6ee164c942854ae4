#include "fuzz/python/interpreter.h"

#include <cstdlib>
#include <cstring>

#include "fuzz/input.h"

namespace telegrad::fuzz {
namespace {

namespace nb = nanobind;

constexpr const char* kProgram = R"(
class Tensor:
    requires_grad = False
    is_leaf = True
    dtype = "byte"
    managed = None

    def is_neg(self):
        return False

    def is_conj(self):
        return False

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return 0

    def __len__(self):  # its memory is the address space
        return 2**63 - 1


class Ref:
    def __init__(self, key):
        self.key = key


def pack(ref):
    return ref.key


def encode(tensor):
    return None


def decode(meta, buffer):
    tensor = Tensor()
    tensor.requires_grad = meta[1]
    tensor.buffer = None if buffer is None else memoryview(buffer)
    return tensor
)";

nb::object& types() {
  static auto* globals = new nb::object;  // of the program above; never destroyed, like the interpreter
  return *globals;
}

void release(PyObject* capsule) {
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, nullptr));
  managed->deleter(managed);
}

/// Reads the ends of a tensor's memory; the address sanitizer reports those that are outside of it.
void touch(const dlpack::Tensor& t) {
  const std::size_t item = t.dtype.bits / 8;
  std::size_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return;
    last += static_cast<std::size_t>(t.shape[i] - 1) * static_cast<std::size_t>(t.strides[i]);
  }
  const auto* data = static_cast<volatile const std::byte*>(t.data);
  static_cast<void>(data[0]);
  static_cast<void>(data[last * item + item - 1]);
}

int managed_to_object(dlpack::ManagedTensor* managed, void** out) {
  if (managed->tensor.dtype.code > 6) {  // as by a torch without this type
    PyErr_SetString(PyExc_RuntimeError, "no such type");
    return -1;
  }
  touch(managed->tensor);
  nb::object tensor = types()["Tensor"]();
  tensor.attr("managed") = nb::steal(PyCapsule_New(managed, nullptr, release));
  *out = tensor.release().ptr();
  return 0;
}

int view_of_object(void* object, dlpack::Tensor* out) {
  const nb::object managed = nb::handle(static_cast<PyObject*>(object)).attr("managed");
  if (managed.is_none()) {
    PyErr_SetString(PyExc_RuntimeError, "no view");
    return -1;
  }
  *out = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(managed.ptr(), nullptr))->tensor;
  return 0;
}

dlpack::ExchangeApi exchange_api() {
  dlpack::ExchangeApi api{};
  api.version = {dlpack::kMajorVersion, 3};
  api.managed_to_object = managed_to_object;
  api.view_of_object = view_of_object;
  return api;
}

codec::Codec* make_codec() {
  static dlpack::ExchangeApi api = exchange_api();
  types() = nb::dict();
  types()["__builtins__"] = nb::module_::import_("builtins");
  nb::steal(PyRun_String(kProgram, Py_file_input, types().ptr(), types().ptr()));
  require(!PyErr_Occurred(), "the program of the fuzzer runs");
  const nb::object capsule = nb::steal(PyCapsule_New(&api, dlpack::kExchangeApiCapsule, nullptr));
  const auto type = nb::borrow<nb::type_object>(types()["Tensor"]);
  codec::TensorBridge bridge(type, capsule, types()["encode"], types()["decode"], nb::make_tuple("byte"), nb::none(),
                             nb::none(), nb::none());
  constexpr std::uint64_t kMaxObjects = 1000;  // inputs can exceed it
  auto* made = new codec::Codec(std::move(bridge), 64, kMaxObjects, nb::borrow(codec::codec_error()));
  made->add_extension({nb::borrow<nb::type_object>(types()["Ref"]), 1, types()["pack"], types()["Ref"]});
  return made;
}

}  // namespace

NB_MODULE(fuzzed, m) { codec::init_codec(m); }

const codec::Codec& codec() {
  static const codec::Codec* const made = [] {
    setenv("PYTHONMALLOC", "malloc", 1);  // for the address sanitizer
    PyImport_AppendInittab("fuzzed", PyInit_fuzzed);
    Py_InitializeEx(0);
    nb::module_::import_("fuzzed");
    return make_codec();
  }();
  return *made;
}

codec::SegmentMemory segment_of(std::size_t size) {
  void* memory = nullptr;
  require(posix_memalign(&memory, 64, size) == 0, "there is memory");
  std::memset(memory, 0, size);
  return {static_cast<std::byte*>(memory), size, memory, [](void* context) noexcept { std::free(context); }};
}

}  // namespace telegrad::fuzz

#include "codec/memory.h"

#include <new>

#include "codec/gil.h"

namespace telegrad::codec {
namespace {

namespace nb = nanobind;

struct Buffer {
  SegmentMemory memory;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const SegmentMemory& memory = nb::inst_ptr<Buffer>(self)->memory;
  return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// Tensors are also destroyed on threads of torch, such as the autograd engine's.
void release_buffer(void* context) noexcept {
  auto* view = static_cast<Py_buffer*>(context);
  const bool has_gil = PyGILState_Check();
  // A thread that requests the GIL of a finalizing interpreter blocks forever; the process ends with the memory.
  if (!has_gil && interpreter_is_ending()) return;
  PyGILState_STATE state{};
  if (!has_gil) state = in_python(PyGILState_Ensure);
  PyObject *type, *value, *trace;  // the release must not disturb a pending exception
  PyErr_Fetch(&type, &value, &trace);
  PyBuffer_Release(view);
  PyErr_Restore(type, value, trace);
  delete view;
  if (!has_gil) PyGILState_Release(state);
}

}  // namespace

SegmentMemory SegmentMemory::of_object(PyObject* object) {
  auto* view = new Py_buffer;
  if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE) < 0) {
    delete view;
    return {};
  }
  return {static_cast<std::byte*>(view->buf), static_cast<std::size_t>(view->len), view, release_buffer};
}

nb::object as_buffer(SegmentMemory memory) { return nb::cast(Buffer{std::move(memory)}); }

void init_memory(nb::module_& m) {
  nb::class_<Buffer>(m, "Buffer", nb::type_slots(slots), "Memory of a received tensor.");
}

}  // namespace telegrad::codec

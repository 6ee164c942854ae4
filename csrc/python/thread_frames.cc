#include "python/thread_frames.h"

namespace nb = nanobind;

namespace telegrad::python {
namespace {

/// Keeps the garbage collector from running.
class NoCollection {
 public:
  NoCollection() = default;
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (was_enabled_) PyGC_Enable();
  }

 private:
  const bool was_enabled_ = PyGC_Disable() != 0;
};

/// Creates the objects of a frame and of all that have called it.
void create_callers(PyFrameObject* frame) {
  Py_INCREF(frame);
  while (frame) {
    PyFrameObject* const caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
}

// Python 3.11 creates the object of a frame when it is asked for. That may run the garbage collector, whose finalizers
// release the GIL: the frame's thread then returns from it, and the object is written to freed memory.
nb::object thread_frames() {
  const NoCollection no_collection;
  nb::object frames = nb::steal(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  if (!frames.is_valid()) throw nb::python_error();
  PyObject *thread, *frame;
  for (Py_ssize_t at = 0; PyDict_Next(frames.ptr(), &at, &thread, &frame);) {
    if (PyFrame_Check(frame)) create_callers(reinterpret_cast<PyFrameObject*>(frame));
  }
  return frames;
}

}  // namespace

void init_thread_frames(nb::module_& m) {
  m.def("thread_frames", thread_frames, nb::sig("def thread_frames() -> dict[int, types.FrameType]"),
        "Return the innermost frame of each thread, by the thread's identifier.\n\n"
        "Safe while the threads run, unlike `sys._current_frames` and `f_back` on Python 3.11. The frames keep the\n"
        "arguments of their functions alive.");
}

}  // namespace telegrad::python

#include "python/callbacks.h"

#include "codec/gil.h"
#include "python/errors.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace telegrad::python {
namespace {

/// Raises an exception between two bytecodes of Python's main thread.
int raise(void* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), static_cast<PyObject*>(error));
  Py_DECREF(static_cast<PyObject*>(error));
  return -1;
}

/// Calls the function. Torch drops its exceptions, so a pending signal handler of Python runs before it, and its
/// exception is raised when torch has returned.
PyObject* run(PyObject* callback, PyObject* argument) {
  nb::object interrupt = error_of([] {
    if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  });
  PyObject* result = call_python(callback, argument);
  if (!interrupt.is_valid()) return result;
  if (Py_AddPendingCall(raise, interrupt.ptr()) == 0) {
    interrupt.release();
  } else {  // the interpreter's queue is full
    const nb::error_scope error_of_callback;
    PyErr_SetObject(interrupt.type().ptr(), interrupt.ptr());
    PyErr_WriteUnraisable(callback);
  }
  return result;
}

PyMethodDef definition = {"callback", run, METH_O, nullptr};

nb::object shielded(nb::handle callback) {
  PyObject* made = PyCFunction_New(&definition, callback.ptr());
  if (!made) nb::raise_python_error();
  return nb::steal(made);
}

}  // namespace

void init_callbacks(nb::module_& m) {
  m.def("shielded", shielded, "callback"_a,
        nb::sig("def shielded(callback: collections.abc.Callable[[typing.Any], typing.Any]) -> "
                "collections.abc.Callable[[typing.Any], typing.Any]"),
        "Wrap a function of one argument that torch calls.\n\n"
        "If the interpreter finalizes while a daemon thread runs it, that thread blocks forever: torch's C++\n"
        "frames would not survive that Python unwinds the thread's stack.");
}

}  // namespace telegrad::python

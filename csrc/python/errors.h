// Helpers for Python's errors and interned names. All need the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <new>

namespace telegrad::python {

namespace nb = nanobind;

inline nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

/// Takes the new reference that a function of Python returned. Throws nb::python_error for null.
inline nb::object python_result(PyObject* result) {
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

/// Takes the Python error that is set, as an exception with its traceback.
inline nb::object take_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return nb::steal(value);
}

/// Throws an exception that `take_error` has taken.
[[noreturn]] inline void rethrow(const nb::object& error) {
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

/// Runs a function. Returns the exception that it raised; not valid if there is none.
template <class F>
nb::object error_of(const F& run) {
  try {
    run();
    return {};
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return take_error();
}

}  // namespace telegrad::python

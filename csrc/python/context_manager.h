// Python context managers in C++.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "codec/gil.h"

namespace telegrad::python {

/// Enters a context manager for its scope. Needs the GIL.
class ContextManager {
 public:
  explicit ContextManager(nanobind::object manager) : manager_(std::move(manager)) {
    in_python([this] { manager_.attr("__enter__")(); });
  }
  ~ContextManager() {
    const nanobind::error_scope kept;
    PyObject* done =
        in_python([this] { return PyObject_CallMethod(manager_.ptr(), "__exit__", "OOO", Py_None, Py_None, Py_None); });
    if (!done) PyErr_WriteUnraisable(manager_.ptr());
    Py_XDECREF(done);
  }
  ContextManager(const ContextManager&) = delete;
  ContextManager& operator=(const ContextManager&) = delete;

 private:
  const nanobind::object manager_;
};

}  // namespace telegrad::python

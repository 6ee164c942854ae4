// Methods of torch's classes, called as the interpreter calls them.
#pragma once

#include <nanobind/nanobind.h>

#include "codec/gil.h"

namespace telegrad::codec {

namespace nb = nanobind;

/// Method without arguments of one class. A method of a C extension is called without a lookup.
class TorchMethod {
 public:
  TorchMethod() = default;
  explicit TorchMethod(nb::object method) : method_(std::move(method)) {
    if (!Py_IS_TYPE(method_.ptr(), &PyMethodDescr_Type)) return;
    const PyMethodDef* const definition = reinterpret_cast<PyMethodDescrObject*>(method_.ptr())->d_method;
    if (definition->ml_flags == METH_NOARGS) function_ = definition->ml_meth;
  }

  /// Calls the method of an object, which must be of the class. Errors are Python's.
  PyObject* operator()(PyObject* self) const {
    return in_python([&] { return function_ ? function_(self, nullptr) : PyObject_CallOneArg(method_.ptr(), self); });
  }

  PyObject* ptr() const { return method_.ptr(); }

 private:
  nb::object method_;
  PyCFunction function_ = nullptr;
};

}  // namespace telegrad::codec

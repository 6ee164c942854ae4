// Sets the scope (telegrad.worker.scope) of a pool thread. All functions need the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "base/clock.h"

namespace telegrad::python {

namespace nb = nanobind;

class ScopeSetter {
 public:
  ScopeSetter() = default;
  /// `current`: the ContextVar; `type`: Scope; `in_callbacks`: the scope of callbacks of the pool. The option
  /// `inherit_from_caller` of the worker decides whether the deadline of a request limits its calls.
  ScopeSetter(nb::object worker, nb::object type, nb::object current, nb::object in_callbacks);

  /// Leaves the scope of this thread.
  void clear() const { set(nullptr); }
  /// Enters the scope of a request, by its connection and call. `depth`: of the calls made in it. Throws
  /// nb::python_error.
  void enter_request(Nanos deadline, const nb::object& context, std::uint64_t connection, std::uint64_t call,
                     std::uint32_t depth) const;
  void enter_callbacks() const { set(in_callbacks_.ptr()); }

  int traverse(visitproc visit, void* arg) const;

 private:
  void set(PyObject* scope) const;

  nb::object worker_, type_, current_, in_callbacks_;
  bool limits_calls_ = true;
};

}  // namespace telegrad::python

// Tuples for Python with named positions.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "python/errors.h"

namespace telegrad::python {

/// Tuple with the positions of `Field`, a table of wire/constants.h. Each is set once before `take`. Needs the GIL.
template <class Field>
class FieldTuple {
 public:
  FieldTuple() : tuple_(python_result(PyTuple_New(Field::kCount))) {}

  template <class T>
  void set(int position, T&& value) {
    PyTuple_SET_ITEM(tuple_.ptr(), position, nb::cast(std::forward<T>(value)).release().ptr());
  }

  nb::tuple take() { return nb::steal<nb::tuple>(tuple_.release()); }

 private:
  nb::object tuple_;
};

}  // namespace telegrad::python

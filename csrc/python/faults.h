// `_core.Faults`: rules of faults for tests, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_faults(nanobind::module_& m);

}  // namespace telegrad::python

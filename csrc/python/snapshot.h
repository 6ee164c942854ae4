// `_core.Snapshot` and its parts, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_snapshot(nanobind::module_& m);

}  // namespace telegrad::python

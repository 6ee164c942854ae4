// Callbacks that torch runs.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_callbacks(nanobind::module_& m);

}  // namespace telegrad::python

#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_engine(nanobind::module_& m);

}  // namespace telegrad::python

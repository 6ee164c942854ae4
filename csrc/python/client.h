// The calling side of a worker: every call of the program goes from its arguments to its value in one native call.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_client(nanobind::module_& m);

}  // namespace telegrad::python

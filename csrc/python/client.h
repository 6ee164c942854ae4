// The calling side of a worker. One native call takes a call of the program from its arguments to its value.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_client(nanobind::module_& m);

}  // namespace telegrad::python

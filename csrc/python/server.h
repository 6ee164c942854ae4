// The serving side of a worker: pool threads serve requests and complete asynchronous calls.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_server(nanobind::module_& m);

}  // namespace telegrad::python

// The serving side of a worker: what a pool thread does with requests, and with outcomes of asynchronous calls.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_server(nanobind::module_& m);

}  // namespace telegrad::python

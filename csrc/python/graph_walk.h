// Walks of torch's graph of a backward pass.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_graph_walk(nanobind::module_& m);

}  // namespace telegrad::python

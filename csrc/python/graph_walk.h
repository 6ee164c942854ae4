// Traversal of torch's autograd graph.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_graph_walk(nanobind::module_& m);

}  // namespace telegrad::python

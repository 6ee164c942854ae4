// Walks of torch's graph of a backward pass.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::bind {

void init_reach(nanobind::module_& m);

}  // namespace telegrad::bind

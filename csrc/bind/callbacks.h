// Callbacks that torch runs.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::bind {

void init_callbacks(nanobind::module_& m);

}  // namespace telegrad::bind

#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::bind {

void init_engine(nanobind::module_& m);

}  // namespace telegrad::bind

#pragma once

#include <nanobind/nanobind.h>

#include "core/engine.h"

namespace telegrad::python {

/// `Engine.start_many`.
void init_multicast(nanobind::class_<Engine>& engine);

}  // namespace telegrad::python

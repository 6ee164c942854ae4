// Frames of all threads of the interpreter.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

void init_thread_frames(nanobind::module_& m);

}  // namespace telegrad::python

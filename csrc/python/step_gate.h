// The gate between the steps of optimizers and the handlers that read their parameters.
// See autograd/consistency/step_gate.py.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

/// `StepGate` and the context managers that it hands out.
void init_step_gate(nanobind::module_& m);

}  // namespace telegrad::python

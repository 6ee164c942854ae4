// Lock between steps of optimizers and handlers that read their parameters.
// See autograd/consistency/step_gate.py.
#pragma once

#include <nanobind/nanobind.h>

namespace telegrad::python {

/// Registers `StepGate` and its context managers.
void init_step_gate(nanobind::module_& m);

}  // namespace telegrad::python

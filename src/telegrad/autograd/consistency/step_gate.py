"""Makes optimizer steps visible between the runs of handlers, not during one.

There is one `StepGate` per worker. Handlers that run in an autograd context pass the gate as readers, any number at
once. A step has exclusive access while the parameters change. Handlers and steps may depend on each other across
workers, so the gate guarantees progress for any user code.

Outside of contexts, with the option `plain_backward`, a *call chain* has the role of the context. A handler begins one
at the first worker with an optimizer, and the handlers and steps below it belong to it. Requests carry its id, which is
negative.

- A step runs no user code while it has access, so it always ends.
- A step waits only for handlers of *other* contexts, and not for handlers of its own thread: a handler that steps its
  own context, at any depth of calls, does not wait for itself.
- A step does not wait for handlers that themselves wait for a step, in their thread or chain: two handlers that both
  step do not wait for each other. This includes handlers that wait for the parameters of another step
  (`StepGate.blocked`).
- While a step waits, arriving handlers wait for the step; otherwise a step on a busy server would never run. Two kinds
  may enter: handlers of the step's own context, and handlers of contexts that have a handler inside already, because
  the step may be waiting for them. A handler waits for at most one step.
- A step waits at most `MAX_WAIT` seconds for handlers, because they may be waiting for the step. Then it takes effect
  while they are inside, and a warning is logged.

A fair lock in the order of arrival would deadlock: handlers call each other across workers, and a lock does not know
these dependencies.

The gate is native (csrc/python/step_gate.cc), so a signal handler that raises cannot interrupt a change of its state.
"""

import logging
from typing import Final

import torch

from telegrad._core import BodyGuard, HandlerGuard, StepGate, StepGuard

__all__ = ["MAX_WAIT", "BodyGuard", "HandlerGuard", "StepGate", "StepGuard", "new_gate", "warn_if_overtaken"]

logger: logging.Logger = logging.getLogger("telegrad")

MAX_WAIT: Final = 20.0  # s that a step waits for handlers inside


def new_gate(max_wait: float = MAX_WAIT) -> StepGate:
    """Create the gate of a worker.

    Args:
        max_wait: Limit in seconds for a step to wait for handlers inside.
    """
    push = torch._C._autograd._push_saved_tensors_default_hooks
    pop = torch._C._autograd._pop_saved_tensors_default_hooks
    return StepGate(push, pop, max_wait)


def warn_if_overtaken(step: StepGuard, context: int) -> None:
    """Log a warning if a step took effect with handlers of other contexts inside.

    Args:
        step: A step that has ended.
        context: The id of its context; negative for a step outside of contexts.
    """
    if step.overtaken:
        logger.warning(
            "a step %s took effect while %d handlers of other contexts ran: they did not end within"
            " the time that a step waits. They may use some parameters before the step and some after it; each"
            " operation gets the gradients of the values that it used.",
            f"of autograd context {context}" if context > 0 else "outside of contexts",
            step.overtaken,
        )

"""When a step of an optimizer becomes visible: between the runs of handlers, not in the middle of one.

One `StepGate` per worker. Handlers that run in an autograd context pass the gate as readers, any number at once. A step
holds the gate alone while the parameters change. Handlers and steps may depend on each other across workers, so the
gate guarantees progress whatever user code does:

- The holder of a step runs no user code, so a step always ends.
- A step waits for handlers of *other* contexts only, and not for handlers of its own thread: a handler that steps its
  own context, however deep in calls, does not wait for itself.
- While a step waits, arriving handlers wait for the step (or a busy server would never let a step through). Two kinds
  are let in: handlers of the step's own context, and handlers whose context has one inside already, since the step may
  be waiting for them. A handler waits for one step at most.
- A step waits `MAX_WAIT` seconds for handlers at most: they may be waiting for the step. Then it takes effect while
  they are inside, and a warning is logged.

A fair lock with the order of arrival would be the usual choice where none of this can happen; here handlers call each
other across workers, and the lock cannot see how.

The gate itself is native (csrc/python/step_gate.cc), so that a signal handler that raises cannot leave it half changed.
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
        max_wait: seconds that a step waits for handlers inside.
    """
    push = torch._C._autograd._push_saved_tensors_default_hooks
    pop = torch._C._autograd._pop_saved_tensors_default_hooks
    return StepGate(push, pop, max_wait)


def warn_if_overtaken(step: StepGuard, context: int) -> None:
    """Log that a step took effect while handlers of other contexts were inside, if it did.

    Args:
        step: a step that has ended.
        context: its context's id.
    """
    if step.overtaken:
        logger.warning(
            "a step of autograd context %d took effect while %d handlers of other contexts ran: they did not end within"
            " the time that a step waits. They see some parameters before the step and some after it; gradients stay"
            " those of what each operation used.",
            context,
            step.overtaken,
        )

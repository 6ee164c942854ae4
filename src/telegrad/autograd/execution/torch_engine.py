"""Torch's autograd engine, called without torch's Python wrapper.

The calls of this module run the local graph only, even if calls of the program continue on other workers
(`plain/interception.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = ["run_engine", "takes_local_call"]

_engine: Any = torch.autograd.graph._engine_run_backward
_bare_engine: Any = getattr(Variable, "_execution_engine", None)
_log: Any = getattr(torch.autograd.graph, "log", None)


def _has_devices() -> bool:
    """Return whether the engine may run nodes on its device threads."""
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or accelerator.current_accelerator() is not None


# Torch's wrapper passes the context of this thread to the device threads.
_can_skip_wrapper = _bare_engine is not None and _log is not None and not _has_devices()


class _Thread(threading.local):
    is_local = False  # the next engine call of this thread is one of this module


_thread = _Thread()


def takes_local_call() -> bool:
    """Return whether this module has begun the current engine call, once per call."""
    is_local, _thread.is_local = _thread.is_local, False
    return is_local


def run_engine(
    outputs: tuple[GradientEdge | Tensor, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[GradientEdge | Tensor, ...],
    retain_graph: bool,
    accumulate: bool,
) -> tuple[Tensor | None, ...]:
    """Run the engine as torch's `backward` or `grad`, without their checks.

    The checks take as long as the start of the engine. They also refuse gradients that the engine sums to the shapes of
    the tensors that were sent.

    Args:
        outputs: The roots.
        grads: A gradient for each.
        inputs: The nodes and leaves to run; empty, if `accumulate`, for all that the roots lead to.
        retain_graph: Whether torch keeps the graph.
        accumulate: Add to `.grad` of leaves, and return nothing.

    Returns:
        The gradients of `inputs`; None for what the roots do not lead to.
    """
    found: tuple[Tensor | None, ...]
    if _can_skip_wrapper and not _log.isEnabledFor(logging.DEBUG):
        found = _bare_engine.run_backward(
            outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=accumulate
        )
        return found
    _thread.is_local = True
    try:
        found = _engine(outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=accumulate)
    finally:
        _thread.is_local = False
    return found

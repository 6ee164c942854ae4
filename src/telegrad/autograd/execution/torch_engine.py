"""Torch's autograd engine, called without torch's Python wrapper.

The calls of this module run the local graph only, even if calls of the program continue on other workers
(`plain/interception.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from telegrad.autograd.context import Entry

__all__ = ["run_engine", "takes_local_call"]


class RunBackward(Protocol):
    """Torch's engine, or its wrapper; `run_engine` describes the arguments."""

    def __call__(
        self,
        outputs: tuple[Entry, ...],
        grads: tuple[Tensor, ...],
        retain_graph: bool,
        create_graph: bool,
        inputs: tuple[Entry, ...],
        /,
        *,
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> tuple[Tensor | None, ...]: ...


_run: RunBackward = torch.autograd.graph._engine_run_backward
_run_bare: RunBackward | None = getattr(getattr(Variable, "_execution_engine", None), "run_backward", None)
_log: logging.Logger | None = getattr(torch.autograd.graph, "log", None)


def _has_devices() -> bool:
    """Return whether the engine may run nodes on its device threads."""
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or accelerator.current_accelerator() is not None


# Torch's wrapper passes the context of this thread to the device threads.
_can_skip_wrapper = not _has_devices()


class _Thread(threading.local):
    is_local = False  # the next engine call of this thread is one of this module


_thread = _Thread()


def takes_local_call() -> bool:
    """Return whether this module has begun the current engine call, once per call."""
    is_local, _thread.is_local = _thread.is_local, False
    return is_local


def run_engine(
    outputs: tuple[Entry, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[Entry, ...],
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
    if _can_skip_wrapper and _run_bare is not None and _log is not None and not _log.isEnabledFor(logging.DEBUG):
        return _run_bare(
            outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=accumulate
        )
    _thread.is_local = True
    try:
        return _run(outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=accumulate)
    finally:
        _thread.is_local = False

"""Torch's engine, called without what torch puts around it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

__all__ = ["run_engine"]

_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_bare_engine: Any = getattr(Variable, "_execution_engine", None)
_log: Any = getattr(torch.autograd.graph, "log", None)


def _has_devices() -> bool:
    """May the engine run nodes on threads of its own?"""
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or accelerator.current_accelerator() is not None


# What torch puts around its engine hands this thread's context on to the threads of devices.
_may_be_bare = _bare_engine is not None and _log is not None and not _has_devices()


def run_engine(
    outputs: tuple[Any, ...], grads: tuple[Tensor, ...], inputs: tuple[Any, ...], retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(..., allow_unused=True)` without its checks, which take as long as the engine's start."""
    found: tuple[Tensor | None, ...]
    if _may_be_bare and not _log.isEnabledFor(logging.DEBUG):
        found = _bare_engine.run_backward(
            outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False
        )
    elif _engine is not None:
        found = _engine(outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False)
    else:
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=retain_graph, allow_unused=True)
    return found

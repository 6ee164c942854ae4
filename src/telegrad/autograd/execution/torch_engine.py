"""Torch's autograd engine, called without torch's Python wrapper."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = ["run_engine"]

_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_bare_engine: Any = getattr(Variable, "_execution_engine", None)
_log: Any = getattr(torch.autograd.graph, "log", None)


def _has_devices() -> bool:
    """Return whether the engine may run nodes on its device threads."""
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or accelerator.current_accelerator() is not None


# Torch's wrapper passes the context of this thread to the device threads.
_can_skip_wrapper = _bare_engine is not None and _log is not None and not _has_devices()


def run_engine(
    outputs: tuple[GradientEdge | Tensor, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[GradientEdge | Tensor, ...],
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Run `torch.autograd.grad` with allow_unused, without its checks.

    The checks take as long as the start of the engine.
    """
    found: tuple[Tensor | None, ...]
    if _can_skip_wrapper and not _log.isEnabledFor(logging.DEBUG):
        found = _bare_engine.run_backward(
            outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False
        )
    elif _engine is not None:
        found = _engine(outputs, grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False)
    else:
        found = torch.autograd.grad(
            outputs,  # type: ignore[arg-type]  # torch accepts a mixture
            inputs,  # type: ignore[arg-type]
            grads,
            retain_graph=retain_graph,
            allow_unused=True,
        )
    return found

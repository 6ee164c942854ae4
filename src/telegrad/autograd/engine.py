"""Torch's engine, called without what torch puts around it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable

from telegrad.autograd.taking import taking

if TYPE_CHECKING:
    from telegrad.autograd.context import Received

__all__ = ["run_engine", "run_to_the_ends"]

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


def run_to_the_ends(
    recvs: Sequence[Received], outputs: Sequence[Any], grads: list[Tensor], retain_graph: bool
) -> Mapping[Any, Sequence[Tensor | None] | None]:
    """Runs what leads to these recvs alone, past many nodes: the engine goes to the ends of the graph. If it were told
    to stop at the recvs, it would look up for each node and edge whether they lead there, which takes a tenth of the
    time of small nodes.

    Not past Python's functions: those of reentrant checkpoints would train parameters beside the context, which the
    engine refuses only where it is told where to stop. Not past nodes that lead nowhere either, which are not to run.

    Args:
        grads: emptied.

    Returns:
        For the node of each recv its gradients; None if it got nothing.
    """
    with taking(recvs) as call:
        if outputs:
            given = (call.gradient, *grads)
            grads.clear()
            _run_all((call.leaf, *outputs), given, retain_graph)
        return call.found


def _run_all(outputs: tuple[Any, ...], grads: tuple[Tensor, ...], retain_graph: bool) -> None:
    """`torch.autograd.backward` without its checks."""
    if _may_be_bare and not _log.isEnabledFor(logging.DEBUG):
        _bare_engine.run_backward(outputs, grads, retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
    elif _engine is not None:
        _engine(outputs, grads, retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(outputs, grads, retain_graph=retain_graph)

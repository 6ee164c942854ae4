"""Checks of what a pipeline and its steps are given."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from telegrad.autograd.graph.local_graph import ends_of, is_outer
from telegrad.autograd.recording import edge_of
from telegrad.nn.pipeline.schedule import SCHEDULES
from telegrad.nn.pipeline.stage_modules import StageModules
from telegrad.nn.remote_module import RemoteModule
from telegrad.rref import RRef
from telegrad.worker.calls.callables import require_plain_function
from telegrad.worker.default_worker import open_worker

__all__ = [
    "StageSpec",
    "check_distinct",
    "check_inputs",
    "check_options",
    "check_reduction",
    "detached",
    "remote_module",
    "scale_of",
]

StageSpec: TypeAlias = nn.Module | Sequence[Any]
"""A `RemoteModule`, a local module, or the arguments of a `RemoteModule`."""

_REDUCTIONS = ("mean", "sum")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_options(stages: Sequence[StageSpec], micro_batches: object, schedule: str) -> None:
    """Check arguments of a pipeline.

    Raises:
        ValueError: there are no stages or micro-batches; an unknown schedule.
        TypeError: the number of micro-batches is no int.
    """
    if not stages:
        raise ValueError("a pipeline needs at least one stage")
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: the schedules are {', '.join(map(repr, SCHEDULES))}")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
        raise TypeError(f"micro_batches has to be an int, and is {micro_batches!r}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches has to be at least 1, and is {micro_batches}")


def check_reduction(reduction: str, loss_fn: object) -> None:
    """Check a reduction and its loss function.

    Raises:
        ValueError: there is no such reduction, or the loss function has another one.
        TypeError: the loss function is no function, or an ``async def``.
    """
    if loss_fn is not None:
        require_plain_function(loss_fn, "loss_fn of a pipeline", "Compute the loss from the stage's result only.")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}: the reductions are {', '.join(map(repr, _REDUCTIONS))}")
    own = getattr(loss_fn, "reduction", reduction)
    if own != reduction:
        raise ValueError(
            f"loss_fn has reduction={own!r}, but the pipeline has reduction={reduction!r}: pass the same to both"
        )


def remote_module(number: int, spec: StageSpec) -> RemoteModule:
    """Return the remote module of a stage.

    Raises:
        TypeError: the stage is not given in one of the supported forms, or has code of its own on this worker.
    """
    if isinstance(spec, RemoteModule):
        _check_no_local_code(number, spec)
        return spec
    if isinstance(spec, StageModules):
        raise TypeError(
            f"stage {number} of a pipeline is a Pipeline, and its forward pass records no gradients: pass its stages"
            " instead"
        )
    if isinstance(spec, nn.Module):
        tensor = next((t for tensors in (spec.parameters(), spec.buffers()) for t in tensors), None)
        open_worker()
        return RemoteModule.init_from_module_rref("cpu" if tensor is None else tensor.device, RRef(spec))
    if not isinstance(spec, (tuple, list)) or not 2 <= len(spec) <= 4:
        raise TypeError(
            f"stage {number} of a pipeline has to be a RemoteModule, a module of this worker, or a tuple (worker,"
            f" module_cls[, args[, kwargs]]), and is {spec!r}"
        )
    return RemoteModule(*spec)


def check_distinct(specs: Sequence[StageSpec], modules: Sequence[RemoteModule]) -> None:
    """Check that no module is the module of several stages.

    Args:
        specs: the stages as they were given.
        modules: the remote module of each.

    Raises:
        ValueError: two stages are the same module.
    """
    numbers: dict[object, int] = {}
    for number, (spec, module) in enumerate(zip(specs, modules, strict=True)):
        rref = module.module_rref
        key: object = (rref.owner_id, rref.id)
        if isinstance(spec, nn.Module) and spec is not module and next(spec.parameters(), None) is not None:
            key = id(spec)  # each stage has a reference of its own to a local module
        first = numbers.setdefault(key, number)
        if first != number:
            raise ValueError(
                f"stages {first} and {number} of a pipeline are the same module: two stages share no parameters"
            )


def _check_no_local_code(number: int, module: RemoteModule) -> None:
    """Check that only the owner has code for the passes: they run past this worker."""
    definer = next(kind for kind in type(module).__mro__ if "forward" in kind.__dict__)
    found = ""
    if not definer.__module__.startswith("telegrad."):
        found = f"a forward of its own, in {definer.__qualname__}"
    elif any(getattr(module, name) for name in _HOOKS):
        found = "hooks that are registered on this worker"
    if found:
        raise TypeError(
            f"stage {number} of a pipeline is a {type(module).__name__} with {found}: the stages run on their owners,"
            " past this worker. Put this code into the module of the owner."
        )


def check_inputs(inputs: Sequence[object]) -> None:
    """Check that the backward pass of a step can continue in the graphs of its inputs.

    Raises:
        RuntimeError: a graph continues on another worker, in an autograd context.
        TypeError: a tensor that requires grad is in a container, where its gradient would be dropped.
    """
    for value in inputs:
        if not isinstance(value, Tensor) and _has_grad(value):
            raise TypeError(
                "an input of a pipeline's step that requires grad is an argument of its own; one of the given ones is a"
                f" {type(value).__name__} with such a tensor inside, which would get no gradient. Pass the tensor as an"
                " argument, or detach() it."
            )
    computed = [value for value in inputs if isinstance(value, Tensor) and value.grad_fn is not None]
    if not computed:
        return
    with torch.enable_grad():
        edges = [edge_of(value) for value in computed]  # with what keeps the graphs alive
    if not all(map(is_outer, ends_of([edge for edge, _ in edges]))):
        raise RuntimeError(
            "an input of a pipeline's step was computed from a tensor that was received in an autograd context, but the"
            " backward pass of a step has no context. Receive the tensor within telegrad.autograd.plain() instead of a"
            " context; or pass input.detach(), for no gradients before the pipeline."
        )


def _has_grad(value: object) -> bool:
    """Return whether a value is or contains a tensor that requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_has_grad, value.values()))
    return isinstance(value, (tuple, list, set)) and any(map(_has_grad, value))


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the factor of a scaler, as it multiplies a loss; None if it is disabled.

    Raises:
        TypeError: it is no scaler.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler has to be a GradScaler, such as telegrad.optim.GradScaler, and is {scaler!r}")
    if not scaler.is_enabled():
        return None
    scaler.scale(torch.ones((), device=scaler._device))  # the first use makes the scale, which its `step` requires
    return torch.tensor(scaler.get_scale(), dtype=torch.float32)


def detached(value: object) -> object:
    """Return a target without its graph."""
    if isinstance(value, (tuple, list)):
        items = [detached(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value.detach() if isinstance(value, Tensor) else value

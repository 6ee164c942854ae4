"""Functions that run on an owner, for its part of a distributed optimizer.

Each takes the two numbers of a reference to the part, which the caller holds: calls with a reference itself would take
the slow path.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from telegrad.errors import NotInitialized
from telegrad.optim import gradients
from telegrad.optim.local import LocalOptimizer
from telegrad.protocols.rref import RRefId
from telegrad.rref import RRef
from telegrad.worker import Worker
from telegrad.worker.calls.callables import callee_of
from telegrad.worker.default_worker import current_worker
from telegrad.worker.scope import current, remaining

__all__ = [
    "Changes",
    "Made",
    "RemoteGroup",
    "accumulate",
    "add_group",
    "create_part",
    "load_state",
    "make_local_optimizer",
    "norms_of",
    "norms_of_references",
    "require_worker",
    "scale",
    "scale_references",
    "state_of",
    "step_of",
    "undo_add",
    "unscale",
    "zero_grad",
]

RemoteGroup = tuple[dict[str, Any], list[RRef[Any]], "list[str] | None"]
"""Options, references and names of a group, or of one owner's part of it."""

Changes = Sequence[tuple[int, dict[str, Any]]]
"""Options to set, by number of a group at the owner."""

Options = list[dict[str, Any]]


Made: TypeAlias = tuple[dict[str, Any], Options, list[tuple[int, ...]]]
"""Groups that an owner has created: defaults, the options of each, and the shapes of the groups' parameters."""


def require_worker() -> Worker:
    """Return the current worker.

    Raises:
        RuntimeError: this process has not joined a group.
    """
    worker = current_worker()
    if worker is None:
        raise NotInitialized
    return worker


def _part(created_on: int, local_id: int) -> tuple[LocalOptimizer, float]:
    """Return a part, and the seconds that its caller waits; -1 is no limit."""
    worker = require_worker()
    local = worker.references.owned(RRefId(created_on, local_id)).get()
    if not isinstance(local, LocalOptimizer):  # else its methods would be called past an allow-list
        raise TypeError(f"the reference of an optimizer's part refers to a {type(local).__qualname__}")
    timeout = remaining(worker.calls.default_timeout, current.get())
    return local, timeout / 1e9 if timeout else -1.0


# ---- parts and their groups


def make_local_optimizer(
    optimizer_class: bytes | Callable[..., torch.optim.Optimizer],
    groups: Sequence[RemoteGroup],
    grouped: bool,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[RRef[LocalOptimizer], Made]:
    """Create an owner's part for another worker.

    Args:
        optimizer_class: the class of the optimizer, or its name in messages.
    """
    return create_part(callee_of(optimizer_class), groups, grouped, args, kwargs)


def create_part(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[RemoteGroup],
    grouped: bool,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[RRef[LocalOptimizer], Made]:
    """Create a part of this worker."""
    values = [(options, [rref.local_value() for rref in rrefs], names) for options, rrefs, names in groups]
    local = LocalOptimizer(require_worker(), optimizer_class, values, grouped, args, kwargs)
    return RRef(local), _description(local, 0)


def add_group(created_on: int, local_id: int, group: RemoteGroup, attempt: str) -> Made:
    """Add a group to a part; see `LocalOptimizer.add_group`."""
    local, timeout = _part(created_on, local_id)
    options, rrefs, names = group
    count = len(local.parameters)
    local.add_group((options, [rref.local_value() for rref in rrefs], names), attempt, timeout)
    defaults, options_of_groups, shapes = _description(local, count)
    return defaults, options_of_groups[-1:], shapes


def undo_add(created_on: int, local_id: int, attempt: str) -> None:
    """Remove a group from a part; see `LocalOptimizer.undo_add`."""
    local, timeout = _part(created_on, local_id)
    local.undo_add(attempt, timeout)


def _description(local: LocalOptimizer, first: int) -> Made:
    """Return a part's groups, and the shapes of its parameters from the first one on."""
    defaults = dict(getattr(local.optimizer, "defaults", {}))
    return defaults, _options(local), [tuple(p.shape) for p in local.parameters[first:]]


def _options(local: LocalOptimizer) -> Options:
    left_out = ("params", "param_names")
    return [{k: v for k, v in group.items() if k not in left_out} for group in local.optimizer.param_groups]


def _set_options(local: LocalOptimizer, changes: Changes) -> None:
    for number, options in changes:
        # Clones: received memory must not be kept.
        local.optimizer.param_groups[number].update(_cloned(options, None))


# ---- steps


def step_of(
    created_on: int,
    local_id: int,
    context_id: int | None,
    changes: Changes = (),
) -> None:
    """Step a part; see `LocalOptimizer.step`.

    Args:
        created_on, local_id: the part.
        context_id: an autograd context; without one, the caller's call chain (negative) or None.
        changes: options to set first.
    """
    local, timeout = _part(created_on, local_id)
    chain = min(context_id or 0, 0)
    with local.exclusive(timeout, chain) if changes else nullcontext():  # no other step gets these options
        _set_options(local, changes)
        local.step(None if chain else context_id, timeout=timeout, chain=chain)


def zero_grad(created_on: int, local_id: int, set_to_none: bool) -> None:
    """Remove the `.grad` of a part's parameters, or set it to zero."""
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        gradients.zero(local.parameters, set_to_none)


def accumulate(created_on: int, local_id: int, context_id: int) -> None:
    """Add a context's gradients to the `.grad` of a part's parameters."""
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        gradients.accumulate(require_worker(), context_id, local.parameters)


# ---- norms and scales


def norms_of(
    created_on: int, local_id: int, context_id: int | None, norm_type: float
) -> tuple[list[int], Tensor | None]:
    """Return the numbers of parameters with a gradient, and the gradients' norms."""
    local, _ = _part(created_on, local_id)
    return _norms(local.parameters, local.gradients(context_id), norm_type)


def norms_of_references(
    references: Sequence[RRef[Tensor]], context_id: int | None, norm_type: float
) -> tuple[list[int], Tensor | None]:
    """Return what `norms_of` does, for parameters without a part."""
    parameters = [rref.local_value() for rref in references]
    return _norms(parameters, gradients.gradients_of(require_worker(), context_id, parameters), norm_type)


def scale(created_on: int, local_id: int, context_id: int | None, factor: float) -> None:
    """Multiply the gradients of a part's parameters."""
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        found = local.gradients(context_id)
        gradients.scale([found[one] for one in local.parameters if one in found], factor)


def scale_references(references: Sequence[RRef[Tensor]], context_id: int | None, factor: float) -> None:
    """Multiply the gradients of parameters."""
    parameters = [rref.local_value() for rref in references]
    found = gradients.gradients_of(require_worker(), context_id, parameters)
    gradients.scale([found[one] for one in parameters if one in found], factor)


def _norms(
    parameters: Sequence[Tensor], found: Mapping[Tensor, Tensor], norm_type: float
) -> tuple[list[int], Tensor | None]:
    numbers = [number for number, one in enumerate(parameters) if one in found]
    if not numbers:
        return [], None
    return numbers, gradients.norms([found[parameters[number]] for number in numbers], norm_type)


def unscale(created_on: int, local_id: int, context_id: int | None, inverse: float, attempt: str) -> bool:
    """Multiply a part's gradients; return whether one was infinite or not a number.

    An attempt that failed on another owner is repeated: then gradients that have not changed since are left.
    """
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        found = local.gradients(context_id)
        mine = [found[one] for one in local.parameters if one in found]
        key, last = (attempt, context_id), local.unscaled
        if last is None or last[0] != key or not last[1].matches(mine):
            infinite = gradients.unscale(mine, inverse)
            last = local.unscaled = key, gradients.Versions(mine), infinite
        return last[2]


# ---- state


def state_of(created_on: int, local_id: int, changes: Changes = ()) -> dict[str, Any]:
    """Return a copy of a part's state on the CPU, after setting options."""
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        _set_options(local, changes)
        # Copies: the result is sent after this function has returned, and a step may follow before that.
        state: dict[str, Any] = _cloned(local.optimizer.state_dict(), torch.device("cpu"))
    return state


def load_state(created_on: int, local_id: int, state: dict[str, Any]) -> Options:
    """Load a part's state; return the options of its groups."""
    local, timeout = _part(created_on, local_id)
    with local.exclusive(timeout):
        local.load_state(_cloned(state, None))  # clones: received memory must not be kept
    return _options(local)


def _cloned(value: Any, device: torch.device | None) -> Any:
    """Copy a value with all tensors in its dicts, lists and tuples."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(value, dict):
        return {key: _cloned(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cloned(item, device) for item in value)
    return value

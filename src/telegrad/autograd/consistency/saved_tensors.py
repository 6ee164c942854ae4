"""Keeps the parameters of a forward pass while optimizers of other trainers step.

Between one trainer's forward and backward pass another trainer's step may change the parameters of a server. Torch then
raises an error ("modified by an inplace operation"), or, if the step replaces the memory of a parameter (``p.data =
new``), silently computes with the new values where an operation has saved the parameter itself (``w * x``, ``x @ w``).
To prevent both:

- Code in a context runs under saved-tensor hooks that save a detached alias instead of a tensor. An alias keeps its
  memory when a step replaces the memory of the parameter.
- Such hooks disable torch's own check of versions, so `_unpack` checks them: it raises an error if the memory of the
  alias has been written to. A step that replaces the memory of a parameter also increments the parameter's version, for
  graphs outside of contexts. The old memory is marked with the version at which it was retired (`swap_storage`), so
  that its aliases are known to be unchanged. The mark is an attribute of the storage's Python object, which lives as
  long as the memory.

The first optimizer of a worker enables the hooks and the gate (`protect`). Before, and on workers without optimizers, a
context has no additional cost.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch.autograd.graph import increment_version

from telegrad.autograd.consistency.step_gate import BodyGuard, HandlerGuard, StepGate, new_gate
from telegrad.autograd.contexts import ID_BITS
from telegrad.types import WorkerInfo
from telegrad.worker.scope import current_chain

__all__ = [
    "PROTECTION",
    "Protection",
    "between_steps",
    "is_shared",
    "new_chain",
    "protect",
    "protection_of",
    "reuse_storage",
    "swap_storage",
    "unprotected",
]

PROTECTION: Final = "autograd.protection"  # in a worker's attachments
_RETIRED: Final = "_telegrad_retired"  # attribute of a storage: last version of the parameter that used it

MODIFIED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}] is at"
    " version {}; expected version {} instead. It was changed by the program itself, not by a telegrad.optim optimizer:"
    " look for an in-place operation, or a local optimizer, on a tensor that a forward pass in a context used."
)


SavedTensorHooks: TypeAlias = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]
"""Functions of the program that pack and unpack a saved tensor."""


# ---- saved tensors


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether other processes share the tensor's memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    alias = tensor.detach()
    return alias, alias._version


def _pack_shared(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Save a copy of shared memory: steps write to it in place."""
    alias = tensor.detach()
    if is_shared(alias):
        alias = alias.clone()
    return alias, alias._version


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    alias, version = saved
    if alias._version != version:
        _check_retired(alias, version)
    return alias


def _check_retired(alias: torch.Tensor, version: int) -> None:
    """Check that an alias with a later version has unchanged, retired memory.

    Raises:
        RuntimeError: The alias has changed.
    """
    retired = getattr(alias.untyped_storage(), _RETIRED, None) if alias.layout is torch.strided else None
    # `swap_storage` increments the version before it changes the memory: an alias created in between has the next
    # version and the old memory.
    if retired is None or version not in (retired, retired + 1):
        raise RuntimeError(MODIFIED.format(alias.type(), list(alias.shape), alias._version, version))


_HOOKS: Final = (_pack, _unpack)
_HOOKS_SHARED: Final = (_pack_shared, _unpack)


def swap_storage(parameter: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Replace the memory of a parameter; saved aliases keep the old memory.

    Args:
        parameter: A leaf.
        new: Tensor of the same shape, type and device; the parameter shares its memory afterwards.

    Returns:
        The old memory, as a tensor. Code outside of any gate may be reading it at this moment, so keep it for a while.
    """
    old = parameter.data
    if old.layout is torch.strided:
        setattr(old.untyped_storage(), _RETIRED, parameter._version)
    increment_version(parameter)
    parameter.data = new
    return old


def reuse_storage(old: torch.Tensor) -> None:
    """Prepare memory that `swap_storage` retired, and that has no aliases, for reuse."""
    storage = old.untyped_storage()
    if hasattr(storage, _RETIRED):
        delattr(storage, _RETIRED)


# ---- guards of code in a context


class Protection:
    """The gate of a worker, and the saved-tensor hooks of code in its contexts.

    Attributes:
        gate: Orders handlers and steps.
        copies_shared: Whether optimizers of this worker step parameters in shared memory, in place.
    """

    __slots__ = ("copies_shared", "gate")

    def __init__(self) -> None:
        self.gate: StepGate = new_gate()
        self.copies_shared: bool = False

    @property
    def _hooks(self) -> tuple[object, object]:
        return _HOOKS_SHARED if self.copies_shared else _HOOKS

    def handler_guard(self, context: int) -> HandlerGuard:
        """Return a guard around the run of a handler, for the thread that runs it."""
        return self.gate.handler(context, self._hooks)

    def context_guard(self, context: int) -> BodyGuard:
        """Return a guard around other code in a context.

        This is its body, a step of a coroutine, or a callback. Steps do not wait for its end: the code
        may run long, and may itself make the steps. So two of its operations may use a parameter before and after
        another trainer's step; each gets the gradients of the value that it used.
        """
        return self.gate.body(context, self._hooks)


class HasAttachments(Protocol):
    """A worker, as far as its protection needs it."""

    info: WorkerInfo
    attachments: dict[str, Any]  # objects of the layers above the worker, by key


def protect(worker: HasAttachments) -> Protection:
    """Return the protection of a worker. The first call enables it permanently."""
    protection: Protection = worker.attachments.setdefault(PROTECTION, Protection())
    return protection


def protection_of(worker: HasAttachments) -> Protection | None:
    """Return the protection of a worker, or None if no optimizer has enabled it."""
    protection: Protection | None = worker.attachments.get(PROTECTION)
    return protection


def between_steps(worker: HasAttachments) -> AbstractContextManager[None]:
    """Return a context manager in which no step changes parameters of a worker.

    It acts like a handler that runs in a context. Steps of other threads wait for its end. On workers without
    optimizers it has no effect.

    Args:
        worker: The `telegrad.worker.Worker`.
    """
    protection = protection_of(worker)
    if protection is None:
        return nullcontext()
    return protection.gate.handler(current_chain() or new_chain(worker.info.id))


def new_chain(worker_id: int) -> int:
    """Return an id for gates that no other code has, on any worker.

    It is for code and steps outside of contexts. Not the id of the plain context: a step does not wait for handlers
    with its own id, and handlers outside of contexts belong to many trainers.

    Args:
        worker_id: Id of the calling worker.
    """
    return -((worker_id << ID_BITS) + next(_chains))


_chains = itertools.count(1)


@contextmanager
def unprotected() -> Iterator[None]:
    """Disable the saved-tensor hooks within: operations save tensors as usual.

    For code that does not support saved-tensor hooks, such as ``torch.func.grad``, in a handler that runs in a context
    on a worker with an optimizer. Gradients of this code are correct only if no step runs between its forward and
    backward pass; otherwise some raise an error, and some are silently wrong.

    Example::

        def slope(x):  # runs on worker1
            with optim.unprotected():
                return torch.func.grad(torch.sin)(x)

        rpc.rpc_sync("worker1", slope, args=(torch.tensor(0.0),))  # tensor(1.)
    """
    pop = torch._C._autograd._pop_saved_tensors_default_hooks
    push = torch._C._autograd._push_saved_tensors_default_hooks
    top: Callable[[bool], SavedTensorHooks | None] = torch._C._autograd._top_saved_tensors_default_hooks
    removed = []
    while (hooks := top(False)) is not None:
        removed.append(hooks)
        pop()
    try:
        yield
    finally:
        for pack, unpack in reversed(removed):
            push(pack, unpack)

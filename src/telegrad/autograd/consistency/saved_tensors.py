"""Gradients of the parameters that the forward pass used, while optimizers change these parameters.

Between one trainer's forward and its backward pass another trainer's step may change the parameters of a server. Torch
then raises ("modified by an inplace operation"), or, if the step puts new memory under a parameter (``p.data = new``),
silently computes with the new values wherever an operation has saved the parameter itself (``w * x``, ``x @ w``). Here:

- What runs in a context runs under saved-tensor hooks that save, in place of a tensor, a detached alias of it. An
  alias keeps the memory that it was made over when a step puts other memory under the parameter.
- Such hooks switch torch's own check of versions off, so `unpack` makes it: an alias whose memory was written to since
  raises. A step that puts new memory under a parameter counts the parameter's version up too, for graphs outside of
  contexts to notice; the old memory is marked with the version at which it was retired (`swap_storage`), so that its
  aliases are known to be whole. The mark is an attribute of the storage's Python object, which lives as long as the
  memory.

All of it is switched on, together with the gate, by the first optimizer of a worker (`protect`); until then, and on
workers without one, a context costs nothing here.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from telegrad.autograd.consistency.step_gate import BodyGuard, HandlerGuard, StepGate, new_gate

__all__ = [
    "PROTECTION",
    "Protection",
    "between_steps",
    "is_shared",
    "protect",
    "protection_of",
    "reuse_storage",
    "swap_storage",
    "unprotected",
]

PROTECTION: Final = "autograd.protection"  # in a worker's attachments
_RETIRED: Final = "_telegrad_retired"  # of a storage: the version of the parameter that it was under to the last

MODIFIED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}] is at"
    " version {}; expected version {} instead. It was changed by the program itself, not by a telegrad.optim optimizer:"
    " look for an in-place operation, or a local optimizer, on a tensor that a forward pass in a context used."
)


# ---- saved tensors


def is_shared(tensor: torch.Tensor) -> bool:
    """Does its memory belong to other processes as well?"""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    alias = tensor.detach()
    return alias, alias._version


def _pack_shared(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Memory that other processes share stays under its parameter, and is written to in place."""
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
    """Another version is right if the parameter has other memory by now, and this one was not written to before.

    Raises:
        RuntimeError: the alias has changed.
    """
    retired = getattr(alias.untyped_storage(), _RETIRED, None) if alias.layout is torch.strided else None
    # `swap_storage` counts up, then changes the memory: an alias made in between has the next version, the old memory
    if retired is None or version not in (retired, retired + 1):
        raise RuntimeError(MODIFIED.format(alias.type(), list(alias.shape), alias._version, version))


_HOOKS: Final = (_pack, _unpack)
_HOOKS_SHARED: Final = (_pack_shared, _unpack)


def swap_storage(parameter: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Puts other memory under a parameter. What has saved the parameter keeps what it has saved.

    Args:
        parameter: a leaf.
        new: of the same shape, type and device; the parameter shares its memory afterwards.

    Returns:
        The old memory, as a tensor. Code that reads the parameter outside of any gate at this very moment may still be
        reading that, so keep it for a while.
    """
    old = parameter.data
    if old.layout is torch.strided:
        setattr(old.untyped_storage(), _RETIRED, parameter._version)
    increment_version(parameter)
    parameter.data = new
    return old


def reuse_storage(old: torch.Tensor) -> None:
    """Memory that `swap_storage` retired is to be used again; nothing refers to it."""
    storage = old.untyped_storage()
    if hasattr(storage, _RETIRED):
        delattr(storage, _RETIRED)


# ---- what code in a context runs in


class Protection:
    """The gate of a worker, and the saved-tensor hooks that code in its contexts runs under.

    Attributes:
        gate: between handlers and steps.
        copies_shared: parameters in memory that other processes share are stepped here, in place.
    """

    __slots__ = ("copies_shared", "gate")

    def __init__(self) -> None:
        self.gate: StepGate = new_gate()
        self.copies_shared: bool = False

    @property
    def _hooks(self) -> tuple[object, object]:
        return _HOOKS_SHARED if self.copies_shared else _HOOKS

    def handler_guard(self, context: int) -> HandlerGuard:
        """Return a context manager around the run of a handler, on the thread that runs it."""
        return self.gate.handler(context, self._hooks)

    def context_guard(self, context: int) -> BodyGuard:
        """Return a context manager around other code that runs in a context: its body, ``with context():``, a step of a
        coroutine, a callback.

        Steps do not wait for its end: the code may last long, and may itself make the steps. So two of its operations
        may see a parameter before and after another trainer's step; gradients are those of what each used.
        """
        return self.gate.body(context, self._hooks)


def protect(worker: Any) -> Protection:
    """Return the protection of a worker. The first call switches it on there, for good."""
    protection: Protection = worker.attachments.setdefault(PROTECTION, Protection())
    return protection


def protection_of(worker: Any) -> Protection | None:
    """Return the protection of a worker; None if it is off there, as nothing is stepped."""
    protection: Protection | None = worker.attachments.get(PROTECTION)
    return protection


def between_steps(worker: Any) -> AbstractContextManager[None]:
    """Within, no step of an optimizer changes parameters of a worker, as in handlers that run in a context. Steps wait
    meanwhile; that of the own thread does not. Where nothing is stepped it costs nothing.

    Args:
        worker: the `telegrad.worker.Worker`.
    """
    protection = protection_of(worker)
    return nullcontext() if protection is None else protection.gate.handler(-next(_outsiders))


_outsiders = itertools.count(1)  # below 0 they are ids of no context


@contextmanager
def unprotected() -> Iterator[None]:
    """Within, operations save tensors as torch does by itself.

    For code that refuses saved-tensor hooks, which ``torch.func.grad`` and its kin do, in a handler that runs in a
    context on a worker whose parameters an optimizer steps. Gradients through what runs within are right only if no
    step comes between its forward and its backward pass; some raise, and some do not.
    """
    pop = torch._C._autograd._pop_saved_tensors_default_hooks
    push = torch._C._autograd._push_saved_tensors_default_hooks
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    taken = []
    while (hooks := top(False)) is not None:
        taken.append(hooks)
        pop()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            push(pack, unpack)

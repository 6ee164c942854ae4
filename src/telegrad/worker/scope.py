"""What a piece of running code belongs to: its worker, its deadline, and torch's state of its thread.

The first two are context variables, so they follow threads and coroutines; grad mode, inference mode and autocast are
state of a thread in torch, so they are read where a call is made and set around the handler.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from telegrad.wire import Flag

__all__ = [
    "Scope",
    "autocast_is_on",
    "autocast_of",
    "caller_flags",
    "caller_state",
    "clean_state",
    "current",
    "handler_state",
    "remaining",
]


class Scope(NamedTuple):
    """Where code runs."""

    worker: Any  # the Worker that calls go through
    deadline: int  # monotonic ns by which the running request's caller gives up; 0: never
    nested: bool  # inside a handler, or a callback of the pool
    request: bool = False  # in the thread that runs a request
    autograd: Any = None  # the autograd context (telegrad.autograd.context.Context) that it belongs to
    connection: int = 0  # over which the request came that it runs for, and its answer goes


current: ContextVar[Scope | None] = ContextVar("telegrad_scope", default=None)

_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", None)
AUTOCAST_DEVICES = ("cpu", "cuda")
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)  # what torch begins with
_NO_CACHE = ("cache", "off")  # among the (device, dtype) pairs of a message


def remaining(timeout: int, scope: Scope | None) -> int:
    """A call's time-out in ns (0: none), no longer than what is left to the request that it is made for."""
    if scope is None or not scope.deadline:
        return timeout
    left = max(scope.deadline - time.monotonic_ns(), 1)
    return min(timeout, left) if timeout else left


def _autocast_by_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES)


autocast_is_on: Callable[[], bool] = _autocast_by_device if _any_autocast is None else _any_autocast


def caller_flags() -> int:
    """The calling thread's state as flags."""
    if torch.is_grad_enabled():
        return 0
    return int(Flag.NO_GRAD | Flag.INFERENCE) if torch.is_inference_mode_enabled() else int(Flag.NO_GRAD)


def caller_state() -> tuple[tuple[str, str], ...] | None:
    """Autocast of the calling thread as (device, dtype) pairs, and one more if it keeps no casts of weights; None when
    it is off, as nearly always."""
    if not autocast_is_on():
        return None
    devices = tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    return devices if torch.is_autocast_cache_enabled() else (*devices, _NO_CACHE)


def autocast_of(pairs: tuple[tuple[str, str], ...] | None) -> tuple[dict[str, torch.dtype], bool]:
    """What `caller_state` says: the type by device, and whether casts are kept."""
    on = {device: getattr(torch, dtype) for device, dtype in pairs or () if device != _NO_CACHE[0]}
    return on, _NO_CACHE not in (pairs or ())


@contextmanager
def handler_state(flags: int, autocast: tuple[tuple[str, str], ...] | None) -> Iterator[None]:
    """The caller's state, for as long as its handler runs."""
    with ExitStack() as stack:
        stack.callback(_default_details)
        if flags & Flag.INFERENCE:
            stack.enter_context(torch.inference_mode())
        elif flags & Flag.NO_GRAD:
            stack.enter_context(torch.inference_mode(False))  # puts everything back at its end, no_grad only one thing
            torch.set_grad_enabled(False)
        on, cache = autocast_of(autocast)
        for device, dtype in on.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        yield


def _default_details() -> None:
    """Autocast's types, and whether it keeps casts, stay when it is switched off, for the next one to find."""
    torch.set_autocast_cache_enabled(True)
    for device, dtype in zip(AUTOCAST_DEVICES, _AUTOCAST_DTYPES, strict=True):
        if torch.get_autocast_dtype(device) != dtype:
            torch.set_autocast_dtype(device, dtype)


def clean_state() -> None:
    """Undoes what a handler left switched in its thread."""
    if not torch.is_grad_enabled():
        if torch.is_inference_mode_enabled():
            # There is no way to leave it but by another guard, which must then live as long as the thread.
            _left_behind.guard = None  # the last one puts back what it found when it goes
            _left_behind.guard = torch.inference_mode(False)
            _left_behind.guard.__enter__()
        torch.set_grad_enabled(True)
    if autocast_is_on():
        for device in AUTOCAST_DEVICES:
            torch.set_autocast_enabled(device, False)
        _default_details()
        torch.clear_autocast_cache()


_left_behind = threading.local()

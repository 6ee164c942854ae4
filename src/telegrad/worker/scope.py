"""Scope of running code: worker, deadline, and torch's state of the thread.

Worker and deadline are context variables, so they follow threads and coroutines. In torch, grad mode, inference mode
and autocast belong to a thread: a call reads them, and the callee sets them around the handler.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch

from telegrad.wire.ints import FLAG_INFERENCE, FLAG_NO_GRAD

__all__ = [
    "Autocast",
    "FullAutocast",
    "Scope",
    "autocast_is_on",
    "autocast_of",
    "caller_flags",
    "caller_state",
    "clean_state",
    "current",
    "current_chain",
    "enter_chain",
    "full_autocast",
    "handler_state",
    "not_needed",
    "outside_contexts",
    "remaining",
    "restore_autocast",
    "without_autocast",
]


class Scope(NamedTuple):
    """Worker, deadline and autograd context of running code."""

    worker: Any  # the Worker that makes the calls
    deadline: int  # deadline of the running request, monotonic ns; 0: none
    depth: int  # of the calls that the code makes: 1 in a handler of a call from outside of handlers, and in callbacks
    request: bool = False  # this thread runs a request
    autograd: Any = None  # the autograd context
    connection: int = 0  # connection of the running request
    call: int = 0  # its id on this connection
    chain: int = 0  # call chain outside of autograd contexts to which the code belongs; negative, 0: none
    limits_calls: bool = True  # the deadline also applies to the calls that the code makes


Autocast: TypeAlias = tuple[tuple[str, str], ...] | None  # see `caller_state`
FullAutocast: TypeAlias = tuple[tuple[tuple[bool, torch.dtype], ...], bool]  # see `full_autocast`
current: ContextVar[Scope | None] = ContextVar("telegrad_scope", default=None)

not_needed: ContextVar[Callable[[], bool] | None] = ContextVar("telegrad_not_needed", default=None)
"""In a streamed generator, and in a function that runs once: returns whether the caller needs no result."""

_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", None)
AUTOCAST_DEVICES = ("cpu", "cuda")
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)  # torch's defaults
_NO_CACHE = ("cache", "off")  # among the (device, dtype) pairs of a message


def remaining(timeout: int, scope: Scope | None) -> int:
    """Return a call's timeout in ns (0: none), limited by the scope's deadline."""
    if scope is None or not scope.deadline or not scope.limits_calls:
        return timeout
    left = max(scope.deadline - time.monotonic_ns(), 1)
    return min(timeout, left) if timeout else left


def enter_chain(chain: int) -> None:
    """Mark the code of this scope as part of a call chain, until the scope ends."""
    scope = current.get()
    if scope is not None:
        current.set(scope._replace(chain=chain))


def current_chain() -> int:
    """Return the call chain of the running code; 0 for none."""
    scope = current.get()
    return 0 if scope is None else scope.chain


@contextmanager
def outside_contexts() -> Iterator[None]:
    """Make calls without the current autograd context: they belong to no forward pass."""
    scope = current.get()
    if scope is None or scope.autograd is None:
        yield
        return
    token = current.set(scope._replace(autograd=None))
    try:
        yield
    finally:
        current.reset(token)


def _autocast_by_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES)


autocast_is_on: Callable[[], bool] = _autocast_by_device if _any_autocast is None else _any_autocast


def caller_flags() -> int:
    """Return the state of the calling thread as flags."""
    if torch.is_grad_enabled():
        return 0
    return FLAG_NO_GRAD | FLAG_INFERENCE if torch.is_inference_mode_enabled() else FLAG_NO_GRAD


def caller_state() -> Autocast:
    """Return autocast of the calling thread as (device, dtype) pairs; None if off.

    A further pair means that the thread caches no casts of weights.
    """
    if not autocast_is_on():
        return None
    devices = tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    return devices if torch.is_autocast_cache_enabled() else (*devices, _NO_CACHE)


def autocast_of(pairs: Autocast) -> tuple[dict[str, torch.dtype], bool]:
    """Return the dtype per device from `caller_state`, and whether casts are cached."""
    on = {device: getattr(torch, dtype) for device, dtype in pairs or () if device != _NO_CACHE[0]}
    return on, _NO_CACHE not in (pairs or ())


def full_autocast() -> FullAutocast:
    """Return autocast of the thread, on or off.

    Returns:
        By device, whether it is on and its dtype; and whether casts of weights are cached.
    """
    devices = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES)
    return devices, torch.is_autocast_cache_enabled()


def restore_autocast(state: FullAutocast) -> None:
    """Set the state that `full_autocast` has returned."""
    devices, cache = state
    torch.set_autocast_cache_enabled(cache)
    for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast of the thread for a block of code."""
    if not autocast_is_on():
        yield
        return
    before = full_autocast()
    for device in AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        restore_autocast(before)


@contextmanager
def handler_state(flags: int, autocast: Autocast) -> Iterator[None]:
    """Set the caller's state while its handler runs, and restore that of the thread.

    Autocast of the thread stays as it is if the caller has none.
    """
    before = full_autocast() if autocast or autocast_is_on() else None
    with ExitStack() as stack:
        if before is not None:
            stack.callback(_restore_changed_autocast, before)
        if flags & FLAG_INFERENCE:
            stack.enter_context(torch.inference_mode())
        elif flags & FLAG_NO_GRAD:
            stack.enter_context(torch.inference_mode(False))  # restores all of the state at exit, unlike no_grad
            torch.set_grad_enabled(False)
        on, cache = autocast_of(autocast)
        for device, dtype in on.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if before is None:
            stack.callback(_clean_autocast)  # before inference_mode ends, which would hide that autocast is still on
        yield


def _restore_changed_autocast(before: FullAutocast) -> None:
    """Restore autocast of a thread in which a handler may have left it changed."""
    if full_autocast() != before:
        restore_autocast(before)
    if not autocast_is_on():
        torch.clear_autocast_cache()  # weights may change before the next handler


def _clean_autocast() -> None:
    """Disable autocast if a handler has left it on.

    Its dtypes and caching stay set when it is disabled, so they are reset.
    """
    if not autocast_is_on():
        return
    for device in AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(True)
    for device, dtype in zip(AUTOCAST_DEVICES, _AUTOCAST_DTYPES, strict=True):
        if torch.get_autocast_dtype(device) != dtype:
            torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


def clean_state() -> None:
    """Reset the state that a handler left set in its thread."""
    if not torch.is_grad_enabled():
        if torch.is_inference_mode_enabled():
            # Only another guard ends inference mode, and that guard must live as long as the thread.
            _kept.guard = None  # the previous guard restores its state when destroyed
            _kept.guard = torch.inference_mode(False)
            _kept.guard.__enter__()
        torch.set_grad_enabled(True)
    _clean_autocast()


_kept = threading.local()

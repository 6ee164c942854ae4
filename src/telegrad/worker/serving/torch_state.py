"""Torch's state of a coroutine, which shares its thread with other coroutines.

Torch keeps grad mode, inference mode, autocast and saved-tensor hooks per thread. If a coroutine entered one of them
and then awaited, the next coroutine would run in that state. So each step of a coroutine runs in the coroutine's own
state, which is saved after the step, and then the state of the thread is restored.
"""

from typing import Any, Self

import torch

from telegrad.wire.ints import FLAG_INFERENCE, FLAGS_OF_TORCH_STATE
from telegrad.worker.calls.tracing import Recording
from telegrad.worker.scope import (
    AUTOCAST_DEVICES,
    Autocast,
    FullAutocast,
    Scope,
    autocast_is_on,
    autocast_of,
    clean_state,
    full_autocast,
    restore_autocast,
)

__all__ = ["CoroutineTorchState"]


_hooks_api = torch._C._autograd
_push_hooks, _pop_hooks = _hooks_api._push_saved_tensors_default_hooks, _hooks_api._pop_saved_tensors_default_hooks
_top_hooks: Any = getattr(
    _hooks_api, "_top_saved_tensors_default_hooks", lambda _: None
)  # without this function, hooks stay set


def _is_default() -> bool:
    """Return whether the thread is in its initial state, apart from dtypes."""
    return torch.is_grad_enabled() and not autocast_is_on() and _top_hooks(False) is None


def _first_autocast(given: Autocast) -> FullAutocast:
    on, cache = autocast_of(given)
    devices = tuple(
        (True, on[device]) if device in on else (False, torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES
    )
    return devices, cache


def _take_hooks(below: int) -> list[Any]:
    """Remove and return the saved-tensor hooks of this thread, except the lowest ones.

    The result begins with the lowest removed hook.
    """
    taken: list[Any] = []
    while (hooks := _top_hooks(False)) is not None:
        taken.insert(0, hooks)
        _pop_hooks()
    for pack, unpack in taken[:below]:
        _push_hooks(pack, unpack)
    return taken[below:]


class CoroutineTorchState:
    """State of one coroutine or generator; a context manager around each of its steps.

    Steps of a coroutine in the default state cost little.

    Args:
        flags: Flags of the request, for the initial state.
        autocast: The caller's (device, dtype) pairs.
        scope: Scope of the request. Steps run inside its autograd context, if any.
        recording: Records each step if the caller is profiled.
    """

    def __init__(
        self,
        flags: int,
        autocast: Autocast,
        scope: Scope | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._scope = scope if scope is not None and scope.autograd is not None else None
        self._hooks: list[Any] = []
        self._recording = recording
        self._inference = bool(flags & FLAG_INFERENCE)
        self._grad = not flags & FLAGS_OF_TORCH_STATE
        self._given = autocast
        self._autocast: FullAutocast | None = None  # from the first step on that needs it
        self._threads: list[tuple[Any, Any, FullAutocast, list[Any]] | None] = []
        self._is_default = self._grad and not autocast

    def __enter__(self) -> Self:
        if self._is_default and self._scope is None and self._recording is None and _is_default():
            self._threads.append(None)
            return self
        outer = _take_hooks(0)  # of the handler that runs a generator
        within = None if self._scope is None else self._scope.worker.autograd.context_guard(self._scope.autograd)
        if within is not None:
            within.__enter__()
        for pack, unpack in self._hooks:
            _push_hooks(pack, unpack)
        before = full_autocast()
        if self._autocast is None:
            self._autocast = _first_autocast(self._given)
        guard = torch.inference_mode(self._inference)
        guard.__enter__()  # saves the thread's grad mode as well
        self._threads.append((within, guard, before, outer))
        torch.set_grad_enabled(self._grad)
        if self._autocast != before:
            restore_autocast(self._autocast)
        if self._recording is not None:
            self._recording.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        saved = self._threads.pop()
        if saved is None and _is_default():
            return
        self._is_default = False
        if self._recording is not None and saved is not None:
            self._recording.__exit__(None, None, None)
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast = full_autocast()
        if saved is None:
            self._hooks = _take_hooks(0)
            clean_state()
            return
        within, guard, before, outer = saved
        if self._autocast != before:
            restore_autocast(before)
            torch.clear_autocast_cache()  # weights may change before the next step
        guard.__exit__(None, None, None)
        self._hooks = _take_hooks(0 if within is None else 1)
        if within is not None:
            within.__exit__(None, None, None)
        for pack, unpack in outer:
            _push_hooks(pack, unpack)

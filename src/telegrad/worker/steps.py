"""Torch's state of a coroutine, which shares its thread with others.

Torch keeps grad mode, inference mode and autocast per thread. A coroutine that enters one of them and then awaits would
leave it to whoever runs next, and find another's when it goes on. So each step of it is run inside its own state, which
is noted when the step ends, and the thread's is put back.
"""

from typing import Any, Self

import torch

from telegrad.wire import Flag
from telegrad.worker.profiling import Recording
from telegrad.worker.scope import AUTOCAST_DEVICES, autocast_of

__all__ = ["StepState"]

_Autocast = tuple[tuple[tuple[bool, torch.dtype], ...], bool]  # by device; are casts of weights kept?


def _autocast() -> _Autocast:
    devices = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES)
    return devices, torch.is_autocast_cache_enabled()


def _set_autocast(state: _Autocast) -> None:
    devices, cache = state
    torch.set_autocast_cache_enabled(cache)
    for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class StepState:
    """The state of one coroutine; a context manager around each of its steps.

    Args:
        flags: of the request, for the state that it begins in.
        autocast: the caller's (device, dtype) pairs.
        recording: what records each step, if the caller is being profiled.
    """

    def __init__(
        self, flags: int, autocast: tuple[tuple[str, str], ...] | None, recording: Recording | None = None
    ) -> None:
        self._recording = recording
        self._inference = bool(flags & Flag.INFERENCE)
        self._grad = not flags & (Flag.NO_GRAD | Flag.INFERENCE)
        on, cache = autocast_of(autocast)
        devices = tuple(
            (True, on[device]) if device in on else (False, torch.get_autocast_dtype(device))
            for device in AUTOCAST_DEVICES
        )
        self._autocast: _Autocast = (devices, cache)
        self._threads: list[tuple[Any, _Autocast]] = []

    def __enter__(self) -> Self:
        before = _autocast()
        guard = torch.inference_mode(self._inference)
        guard.__enter__()  # notes the thread's grad mode as well
        self._threads.append((guard, before))
        torch.set_grad_enabled(self._grad)
        if self._autocast != before:
            _set_autocast(self._autocast)
        if self._recording is not None:
            self._recording.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast = _autocast()
        guard, before = self._threads.pop()
        if self._autocast != before:
            _set_autocast(before)
            torch.clear_autocast_cache()  # casts of weights that may have changed by the next step
        guard.__exit__(None, None, None)

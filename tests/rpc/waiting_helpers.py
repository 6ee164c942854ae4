"""Helpers for tests of `wait_all`: calls held by a gate, and waiting threads."""

import threading
from collections.abc import Callable
from typing import Any

from telegrad import _core, rpc
from telegrad.testing import Gate, Local, eventually
from telegrad.worker.calls import wait_all


def echo(x: Any = 1) -> Any:
    return x


def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


def call(function: Any = echo, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_async("w1", function, args, **kwargs)


def held(gate: Gate, value: Any = None) -> Any:
    """Handler that runs until the gate opens."""
    future = call(gate.enter, value)
    gate.wait_for()
    return future


class Unpickled:
    """Value that a function of the test unpickles."""

    def __init__(self, read: Local[Callable[[], Any]]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return run_local, (self.read,)


def run_local(function: Local[Callable[[], Any]]) -> Any:
    return function.value()


def unpickled(read: Local[Callable[[], Any]], gate: Gate | None = None) -> Any:
    if gate is not None:
        gate.enter()
    return Unpickled(read)


def wait_until_in_core(thread: threading.Thread) -> None:
    """Wait until the thread waits inside the core."""

    def collects() -> bool:
        frame = _core.thread_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code is wait_all._collect.__code__

    eventually(collects)


def wait_until_in_wait_all(thread: threading.Thread) -> None:
    """Wait until the thread is inside `wait_all`."""

    def waits() -> bool:
        frame = _core.thread_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not wait_all._wait_all.__code__:
            frame = frame.f_back
        return frame is not None

    eventually(waits)

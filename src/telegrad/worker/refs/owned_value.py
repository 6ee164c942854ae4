"""A value that other workers refer to, on the worker that owns it."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from telegrad.serialize.tracebacks import clone_exception
from telegrad.waits import wait_for

__all__ = ["OwnedValue"]


class OwnedValue:
    """A value that this worker owns, or will when the function that makes it has returned.

    Args:
        lock: the lock of the worker's references. It guards `set_result` and `add_waiter`, and no other method.
    """

    __slots__ = ("_lock", "_waiters", "error", "ready", "value")

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.ready: bool = False  # the last to be set
        self._lock = lock
        self._waiters: list[Callable[[], None]] | None = None

    def set_result(self, value: Any, error: BaseException | None) -> Sequence[Callable[[], None]]:
        """The value is there (or will never be). Returns what was waiters, to be run without the lock."""
        self.value, self.error = value, error
        self.ready = True
        waiters, self._waiters = self._waiters, None
        return waiters or ()

    def add_waiter(self, resume: Callable[[], None]) -> bool:
        """Runs `resume` when the value is there. False: it is there already, so it was not kept."""
        if self.ready:
            return False
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(resume)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the value is there. False: not within `timeout` seconds."""
        if self.ready:
            return True
        there = threading.Event()
        with self._lock:
            if not self.add_waiter(there.set):
                return True
        return wait_for(there, timeout)

    def get(self) -> Any:
        """The value; blocks until it is there, and raises what making it raised."""
        self.wait()
        error = self.error
        if error is None:
            return self.value
        raise clone_exception(error)

"""A value that other workers refer to, on the worker that owns it."""

import threading
from collections.abc import Callable
from typing import Any

from telegrad.serialize.exceptions import afresh

__all__ = ["OwnedValue"]


class OwnedValue:
    """A value that this worker owns, or will when the function that makes it has returned. Guarded by the worker's
    reference lock; `wait` and `get` may be called by anyone."""

    __slots__ = ("_done", "_waiting", "error", "scripted", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.scripted = False
        self._done = threading.Event()
        self._waiting: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        return self._done.is_set()

    def settle(self, value: Any, error: BaseException | None) -> list[Callable[[], None]]:
        """The value is there (or will never be). Returns what was parked, to be run without the lock."""
        self.value, self.error = value, error
        self._done.set()
        parked, self._waiting = self._waiting, []
        return parked

    def park(self, resume: Callable[[], None]) -> bool:
        """Runs `resume` when the value is there. False: it is there already, so it was not kept."""
        if self._done.is_set():
            return False
        self._waiting.append(resume)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    def get(self) -> Any:
        """The value; blocks until it is there, and raises what making it raised."""
        self._done.wait()
        error = self.error
        if error is None:
            return self.value
        raise afresh(error)

"""Values that other workers refer to, and functions that wait for references."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from telegrad.protocols.rref import RRefId
from telegrad.serialize.tracebacks import clone_exception
from telegrad.waits import wait_for

__all__ = ["ConfirmationWaiters", "OwnedValue", "free", "split"]


class OwnedValue:
    """Value that this worker owns, or will own once the creating function returns.

    Args:
        lock: Lock of the worker's references. It guards `set_result` and `add_waiter`, and no other method.
    """

    __slots__ = ("_lock", "_waiters", "error", "ready", "value")

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.ready: bool = False  # set last
        self._lock = lock
        self._waiters: list[Callable[[], None]] | None = None

    def set_result(self, value: object, error: BaseException | None) -> Sequence[Callable[[], None]]:
        """Set the value, or the error of its creation; return the waiters to run.

        The caller runs them without the lock.
        """
        self.value, self.error = value, error
        self.ready = True
        waiters, self._waiters = self._waiters, None
        return waiters or ()

    def add_waiter(self, resume: Callable[[], None]) -> bool:
        """Run `resume` once the value is ready; return False if it is ready already."""
        if self.ready:
            return False
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(resume)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the value is ready; return False on timeout.

        Args:
            timeout: Limit in seconds; None for no limit.
        """
        if self.ready:
            return True
        there = threading.Event()
        with self._lock:
            if not self.add_waiter(there.set):
                return True
        return wait_for(there, timeout)

    def get(self) -> Any:
        """Wait for the value and return it, or raise the error of its creation."""
        self.wait()
        error = self.error
        if error is None:
            return self.value
        raise clone_exception(error)


class ConfirmationWaiters:
    """Functions that wait until owners count some references.

    Guarded by the lock of the worker's references.
    """

    def __init__(self) -> None:
        self._waiting: dict[RRefId, list[tuple[set[RRefId], Callable[[], None]]]] = {}

    def add(self, rrefs: set[RRefId], resume: Callable[[], None]) -> bool:
        """Add a function to run once all references are confirmed; False if none."""
        for rref in rrefs:
            self._waiting.setdefault(rref, []).append((rrefs, resume))
        return bool(rrefs)

    def confirm(self, rref: RRefId) -> list[Callable[[], None]]:
        """Remove a confirmed reference, and return the functions that can run."""
        ready = []
        for waiting, resume in self._waiting.pop(rref, ()):
            waiting.discard(rref)
            if not waiting:
                ready.append(resume)
        return ready

    def clear(self) -> None:
        """Drop all functions."""
        self._waiting.clear()


def split(deferred: Sequence[Callable[[], None]]) -> tuple[list[Callable[[], None]], list[OwnedValue]]:
    """Return the other functions, and the values that `free` drops."""
    others: list[Callable[[], None]] = []
    values: list[OwnedValue] = []
    for action in deferred:
        if isinstance(action, partial) and action.func is free:
            values += action.args
        else:
            others.append(action)
    return others, values


def free(_: OwnedValue) -> None:
    """Drop the last reference to a value, without any lock held."""

"""Waiting for events in tests.

Calls within one process still pickle their arguments: an Event among them cannot be serialized, and a list that a
handler appends to is a copy. `Local` passes the object itself. `Gate` is the event that most tests need: a handler has
started, and may continue.
"""

import itertools
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from telegrad import _core

__all__ = ["Gate", "Local", "eventually", "run_all"]

T = TypeVar("T")

DEFAULT_TIMEOUT = 10.0
_FIRST_PAUSE = 0.0005  # s
_LONGEST_PAUSE = 0.02  # s


def eventually(condition: Callable[[], object], timeout: float = DEFAULT_TIMEOUT, what: str = "") -> None:
    """Wait until the condition is true.

    For conditions without an event, such as a count; events have their own `wait`.

    Args:
        condition: evaluated repeatedly, so it should be fast.
        timeout: limit in seconds.
        what: name of the condition, for the message.

    Raises:
        AssertionError: the condition did not become true in time; the text has the stacks of all threads.

    Example::

        from telegrad.testing import eventually

        with cluster(2):
            future = rpc.rpc_async("w1", max, args=(1, 2))
            eventually(future.done)
    """
    deadline = time.monotonic() + timeout
    never = threading.Event()
    pause = _FIRST_PAUSE
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout:g} s without success for {what or condition}\n{stacks()}")
        never.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in _core.thread_frames().items():
        parts.append(f"--- thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "".join(parts)


_keys = itertools.count()
_locals: "weakref.WeakValueDictionary[int, Local[Any]]" = weakref.WeakValueDictionary()


class Local(Generic[T]):
    """Wrapper that passes an object itself through calls within this process.

    ``Local(x).value is x`` on the callee. The creator must keep the wrapper alive until it has arrived.

    Args:
        value: anything.

    Example::

        from telegrad.testing import Local

        seen = Local([])
        with cluster(2):
            rpc.rpc_sync("w1", lambda local: local.value.append(1), args=(seen,))
        assert seen.value == [1]
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self._key = next(_keys)
        _locals[self._key] = self

    def __reduce__(self) -> tuple[object, ...]:
        return _local, (self._key,)


def _local(key: int) -> Local[Any]:
    found = _locals.get(key)
    if found is None:
        raise LookupError(f"Local {key} belongs to another process, or was not kept alive")
    return found


class Gate:
    """Barrier at which handlers wait until a test opens it.

    Calls within this process pass the object itself.

    Example::

        from telegrad.testing import Gate

        with cluster(2):
            gate = Gate()
            future = rpc.rpc_async("w1", gate.enter)
            gate.entered.acquire(timeout=5)  # the handler runs now
            gate.open()
            future.wait()
    """

    def __init__(self) -> None:
        self.entered: threading.Semaphore = threading.Semaphore(0)
        self._opened = threading.Event()
        self._self = Local(self)

    def enter(self, value: object = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Signal the arrival, and wait until the gate is open.

        Args:
            value: returned when the gate is open.
            timeout: limit in seconds.

        Raises:
            TimeoutError: the gate was not opened in time.
        """
        self.entered.release()
        if not self._opened.wait(timeout):
            raise TimeoutError("the gate was not opened in time")
        return value

    def wait_for(self, count: int = 1, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait for the given number of arrivals not yet waited for.

        Raises:
            AssertionError: they did not arrive; the text has the stacks of all threads.
        """
        for number in range(count):
            if not self.entered.acquire(timeout=timeout):
                raise AssertionError(f"{number} of {count} arrived at the gate\n{stacks()}")

    def open(self) -> None:
        """Open the gate for good."""
        self._opened.set()

    def is_open(self) -> bool:
        """Return whether the gate is open."""
        return self._opened.is_set()

    def __reduce__(self) -> tuple[object, ...]:
        return _value_of, (self._self,)


def _value_of(local: Local[T]) -> T:
    return local.value


def run_all(functions: Iterable[Callable[[], T]], timeout: float = 60.0) -> list[T]:
    """Run functions at the same time, each in its own thread.

    Args:
        timeout: limit in seconds for all of them together.

    Returns:
        Their results, in order.

    Raises:
        AssertionError: some did not end in time; the text has the stacks of all threads.
        the error of the first function that failed; the others have ended by then.

    Example::

        from telegrad.testing import run_all

        with cluster(2) as group:
            first, second = group
            calls = [lambda: first.rpc_sync("w1", max, (1, 2)), lambda: second.rpc_sync("w0", min, (1, 2))]
            assert run_all(calls) == [2, 1]
    """
    todo = list(functions)
    results: list[Any] = [None] * len(todo)
    errors: list[BaseException | None] = [None] * len(todo)

    def run(index: int) -> None:
        try:
            results[index] = todo[index]()
        except BaseException as e:
            errors[index] = e

    threads = [threading.Thread(target=run, args=(i,), name=f"run-all-{i}", daemon=True) for i in range(len(todo))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise AssertionError(f"{', '.join(late)} did not end within {timeout:g} s\n{stacks()}")
    for error in errors:
        if error is not None:
            raise error
    return results

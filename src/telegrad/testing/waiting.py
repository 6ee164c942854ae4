"""Waiting for events in tests.

In a group within one process, what is sent is still pickled: an Event among the arguments of a call cannot travel,
and a list that a handler appends to is a copy. `Local` lets the object itself through, and `Gate` is the event that
most tests want: somebody is here, and may go on.
"""

import itertools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

__all__ = ["Gate", "Local", "eventually", "run_all"]

T = TypeVar("T")

DEFAULT_TIMEOUT = 10.0
_FIRST_PAUSE = 0.0005  # s
_LONGEST_PAUSE = 0.02  # s


def eventually(condition: Callable[[], object], timeout: float = DEFAULT_TIMEOUT, what: str = "") -> None:
    """Returns when the condition is true. For what nobody announces, such as a count; events have their own `wait`.

    Args:
        condition: asked again and again, so it should be quick.
        timeout: seconds.
        what: is waited for, for the message.

    Raises:
        AssertionError: the condition did not come true in time; the text has the stacks of all threads.
    """
    deadline = time.monotonic() + timeout
    never = threading.Event()
    pause = _FIRST_PAUSE
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what or condition}\n{stacks()}")
        never.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def stacks() -> str:
    """Where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"--- thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "".join(parts)


_keys = itertools.count()
_locals: "weakref.WeakValueDictionary[int, Local[Any]]" = weakref.WeakValueDictionary()


class Local(Generic[T]):
    """Carries an object through remote calls within this process as it is: ``Local(x).value is x`` at the other end.

    Must be kept alive by whoever made it for as long as it may arrive somewhere.

    Args:
        value: anything.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self._key = next(_keys)
        _locals[self._key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _local, (self._key,)


def _local(key: int) -> Local[Any]:
    found = _locals.get(key)
    if found is None:
        raise LookupError(f"Local {key} is not of this process, or nobody has kept it")
    return found


class Gate:
    """Where handlers wait until a test lets them go on. Travels as itself within this process.

    Example::

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

    def enter(self, value: Any = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Announces itself, and waits until the gate is open.

        Args:
            value: is returned.
            timeout: seconds.

        Raises:
            TimeoutError: nobody opened the gate.
        """
        self.entered.release()
        if not self._opened.wait(timeout):
            raise TimeoutError("nobody opened the gate")
        return value

    def wait_for(self, count: int = 1, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Waits until as many have entered (and were not waited for before).

        Raises:
            AssertionError: they did not come; the text has the stacks of all threads.
        """
        for number in range(count):
            if not self.entered.acquire(timeout=timeout):
                raise AssertionError(f"{number} of {count} came to the gate\n{stacks()}")

    def open(self) -> None:
        """Lets everybody through, from now on."""
        self._opened.set()

    def is_open(self) -> bool:
        """Has it been opened?"""
        return self._opened.is_set()

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_of, (self._self,)


def _value_of(local: Local[T]) -> T:
    return local.value


def run_all(functions: Iterable[Callable[[], T]], timeout: float = 60.0) -> list[T]:
    """Runs functions at the same time, each in a thread of its own.

    Args:
        timeout: seconds, for all of them together.

    Returns:
        Their results, in order.

    Raises:
        AssertionError: some did not end in time; the text has the stacks of all threads.
        what the first function that failed raised; the others have ended by then.
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

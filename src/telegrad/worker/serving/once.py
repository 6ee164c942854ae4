"""Runs of functions for calls with a `Retry`: each runs once.

A request names the run by a key. The first request with it runs the function; later ones get its result, for as long as
the caller may ask (the window). The memory is bounded, so a result may be forgotten earlier; then the function runs
again, as it may for any call with a `Retry`.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import CoroutineType
from typing import Any, TypeAlias

from torch.futures import Future

from telegrad.worker import process_hooks
from telegrad.worker.calls.callables import find_function
from telegrad.worker.calls.callables import run as run_function
from telegrad.worker.calls.future import NO_DEVICES, CallFuture, awaitable_of
from telegrad.worker.calls.interceptors import carriers
from telegrad.worker.scope import current, not_needed
from telegrad.worker.serving.event_loop import bind_torch_state
from telegrad.worker.serving.intercepted import has_async_mark, not_a_future

__all__ = ["RememberedRuns", "run_once"]

Key: TypeAlias = tuple[int, int]
"""Incarnation of the caller, and its number of the run."""

_MOST_RUNS = 4096
_MOST_BYTES = 64 << 20  # of results that are done; one larger result alone is remembered
_FIXED_BYTES = 256  # of a run without tensors
_CLOSED = (1 << 64) - 1  # `Engine.largest_body` of a connection that has closed


class _Run:
    """Run of a function."""

    __slots__ = ("expires", "future", "nbytes")

    def __init__(self, expires: float) -> None:
        self.expires = expires
        self.nbytes = 0
        self.future: CallFuture[Any] = CallFuture(NO_DEVICES)
        self.future._read = True  # the first caller gets a failure


class RememberedRuns:
    """Runs of one worker, and their results.

    Args:
        later: Runs a function after some seconds.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self, later: Callable[[float, Callable[[], object]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._later = later
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[Key, _Run] = {}  # in the order of their beginning
        self._nbytes = 0
        self._is_timer_set = False

    def __len__(self) -> int:
        return len(self._runs)

    def enter(self, key: Key, window: float) -> tuple[_Run, bool]:
        """Return the run of a key, and whether it begins now.

        Args:
            key: The key.
            window: Seconds for which the caller may ask again.
        """
        with self._lock:
            run = self._runs.get(key)
            if run is not None:
                return run, False
            run = self._runs[key] = _Run(self._clock() + window)
            dropped = self._evict()
            sets_timer, self._is_timer_set = not self._is_timer_set, True
        del dropped  # without the lock: finalizers of the program may run
        if sets_timer:
            self._later(window, self.forget_expired)
        return run, True

    def complete(self, key: Key, run: _Run, value: object, error: BaseException | None) -> None:
        """Remember how a run has ended."""
        with self._lock:
            if self._runs.get(key) is run:
                run.nbytes = _FIXED_BYTES + _nbytes(value)
                self._nbytes += run.nbytes
            dropped = self._evict(kept=run)
        del dropped
        if error is None:
            run.future.set_result(value)
        else:
            run.future.set_exception(error)

    def forget(self, key: Key, run: _Run, error: BaseException) -> None:
        """Forget a run that has been canceled; requests that wait for it fail."""
        with self._lock:
            self._runs.pop(key, None)
        run.future.set_exception(error)

    def forget_expired(self) -> None:
        """Forget the runs whose caller asks no more, and set the next timer."""
        with self._lock:
            now = self._clock()
            expired = [self._pop(key) for key, run in list(self._runs.items()) if run.expires <= now]
            left = min((run.expires for run in self._runs.values()), default=None)
            self._is_timer_set = left is not None
        del expired
        if left is not None:
            self._later(left - now, self.forget_expired)

    def _evict(self, kept: _Run | None = None) -> list[_Run]:
        """Remove the oldest runs that are done, while there are too many."""
        dropped: list[_Run] = []
        if len(self._runs) <= _MOST_RUNS and self._nbytes <= _MOST_BYTES:
            return dropped
        for key, run in list(self._runs.items()):
            if len(self._runs) <= _MOST_RUNS and self._nbytes <= _MOST_BYTES:
                break
            if run.nbytes and run is not kept:
                dropped.append(self._pop(key))
        return dropped

    def _pop(self, key: Key) -> _Run:
        run = self._runs.pop(key)
        self._nbytes -= run.nbytes
        return run


def run_once(
    key: Key, window: float, function: bytes | Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
) -> Any:
    """Run a function, or return the result of its run by an earlier request.

    Args:
        key: The run.
        window: Seconds for which the caller may ask again.
        function: The function's name in messages, or the function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result, or a coroutine of it.
    """
    scope = current.get()
    assert scope is not None
    engine, runs = scope.worker.engine, scope.worker.remembered_runs
    run, begins = runs.enter(key, window)
    if not begins:
        return _result_of(run)
    was_asked = False

    def is_canceled() -> bool:
        """Return whether the caller has canceled: a lost connection alone does not count."""
        nonlocal was_asked
        if not engine.is_canceled(scope.connection, scope.call) or is_disconnected():
            return False
        was_asked = True
        return True

    def is_disconnected() -> bool:
        return bool(engine.largest_body(scope.connection) == _CLOSED)

    token = not_needed.set(is_canceled)
    try:
        callee: Any = find_function(function) if isinstance(function, bytes) else function
        result = run_function(callee, args, kwargs)
        if type(result) is CoroutineType:
            return _finish(runs, key, run, bind_torch_state(result), is_disconnected)
        if has_async_mark(callee):
            if not isinstance(result, Future):
                raise not_a_future(result, callee)
            return _finish(runs, key, run, awaitable_of(result), is_disconnected)
    except BaseException as error:  # SystemExit too: the caller gets a reply
        if process_hooks.forked:
            raise
        runs.complete(key, run, None, error)
        raise
    finally:
        not_needed.reset(token)
    if was_asked:  # the function may have returned early
        runs.forget(key, run, RuntimeError("the call was canceled"))
    else:
        runs.complete(key, run, result, None)
    return result


async def _result_of(run: _Run) -> object:
    return await run.future


async def _finish(
    runs: RememberedRuns, key: Key, run: _Run, awaitable: Awaitable[object], is_disconnected: Callable[[], bool]
) -> object:
    """Await a deferred result, which a lost connection does not cancel."""

    def ended(task: asyncio.Future[object]) -> None:
        if task.cancelled():
            runs.forget(key, run, RuntimeError("the call was canceled"))
        else:
            error = task.exception()
            runs.complete(key, run, None if error is not None else task.result(), error)

    task = asyncio.ensure_future(_await(awaitable))
    task.add_done_callback(ended)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not is_disconnected():
            task.cancel()
        raise


def _await(awaitable: Awaitable[object]) -> Coroutine[Any, Any, object]:
    async def wait() -> object:
        return await awaitable

    return wait()


def _nbytes(value: object) -> int:
    """Estimate the bytes of the tensors and texts in a value."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (tuple, list)):
        return sum(map(_nbytes, value)) + 8 * len(value)
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values())) + 16 * len(value)
    nbytes = getattr(value, "nbytes", None)  # of tensors, arrays and views
    return nbytes if isinstance(nbytes, int) else 0


class _RunCarrier:
    """Call with a `Retry` as interceptors see it: a call of the program's function."""

    kind = "retry"

    def show(self, args: Sequence[Any], /) -> tuple[object, Sequence[Any], Mapping[str, Any]]:
        _, _, function, values, named = args
        return (find_function(function) if isinstance(function, bytes) else function), values, named

    def change(
        self, args: Sequence[Any], function: object, values: Sequence[Any], named: Mapping[str, Any], /
    ) -> tuple[Any, ...]:
        return *args[:2], function, tuple(values), dict(named)

    def is_reply(self, _: object, /) -> bool:
        return True


carriers[run_once] = _RunCarrier()

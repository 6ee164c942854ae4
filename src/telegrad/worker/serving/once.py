"""Runs of functions for calls with a `Retry`: each at most once in a process.

A request names its run by the caller's incarnation and a number of the caller. The first request with it runs the
function; later ones, of later sessions with the same incarnation, get its result.

The end of a session does not cancel a run: its caller may ask again in the next one. A run is canceled by the latest
request for it, in a session that is open, or when the caller's incarnation is gone: it has left, the group has lost it,
or a newer process has its name. Then its results are dropped as well.

A result is kept until its caller asks no more: until a later request of the caller says so
(`telegrad.worker.calls.settled`), until the caller's deadline, or for a while after the end (the window). If many are
kept, the oldest are dropped earlier. A request for a dropped result fails: the function does not run again. The worker
remembers the keys of the last ended runs, and which runs of each caller are settled or forgotten. A request for one of
these fails, too: its function may have run.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from torch.futures import Future

from telegrad.errors import Cancelled, TelegradError
from telegrad.worker import process_hooks
from telegrad.worker.calls import tracing
from telegrad.worker.calls.callables import callee_of, full_name_of
from telegrad.worker.calls.callables import run as run_function
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.interceptors import CallCarrier, carriers
from telegrad.worker.calls.settled import Settled
from telegrad.worker.closed import AnyEngine
from telegrad.worker.scope import caller_flags, caller_state, current, not_needed
from telegrad.worker.serving.deferred_results import DeferredResult, deferred_result
from telegrad.worker.serving.event_loop import EventLoop

__all__ = ["RememberedRuns", "run_once"]

Key: TypeAlias = tuple[int, int]
"""Incarnation of the caller, and its number of the run."""

Terms: TypeAlias = tuple[float, tuple[int, ...]]
"""Window of a run in seconds, and open runs of its caller."""

RequestKey: TypeAlias = tuple[int, int]
"""Connection and call of a request."""

_MOST_RESULTS = 4096
_MOST_DROPPED = 65536  # runs without their result
_MOST_ENDED = 65536  # keys of runs of which nothing else is known
_FIXED_BYTES = 256  # of a result without tensors


class _Run:
    """Run of a function.

    Args:
        function: Name of the function.
        request: The latest request for it.
        window: Seconds for which the result is kept.
        deadline: Deadline of the caller.
    """

    __slots__ = ("cancel", "canceled", "deadline", "expires", "function", "future", "nbytes", "request", "window")

    def __init__(self, function: str, request: RequestKey, window: float, deadline: float) -> None:
        self.function: str = function
        self.request: RequestKey = request
        self.window: float = window
        self.deadline: float = deadline
        self.expires: float = math.inf  # until the function has ended
        self.nbytes: int = 0  # of its result; 0: it runs, or its result was dropped
        self.canceled: bool = False
        self.cancel: Callable[[], object] | None = None  # cancels its coroutine; any thread may call it
        self.future: CallFuture[Any] | None = CallFuture._of(is_read=True)  # None: its result was dropped

    @property
    def has_ended(self) -> bool:
        """Whether the function has ended."""
        return self.expires != math.inf

    def end(self) -> None:
        """Cancel the run: no caller needs its result. Any thread may call this."""
        self.canceled = True
        if self.cancel is not None:
            self.cancel()


class _Caller:
    """Runs of one caller, by their numbers."""

    __slots__ = ("results", "settled")

    def __init__(self) -> None:
        self.settled: Settled = Settled()
        self.results: list[int] = []  # heap of the numbers with a result, and of some that are forgotten


class RememberedRuns:
    """Runs of one worker, and their results. Any thread may use it.

    Args:
        later: Runs a function after some seconds.
        max_bytes: Bytes of results that are kept (option ``retry_results_bytes``); one larger result alone is kept.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], object]], None],
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes: int = max_bytes
        self.drops: int = 0  # of results, because there were too many
        self._later = later
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[Key, _Run] = {}  # in the order of their beginning
        self._results: dict[Key, _Run] = {}  # of these, the ones with a result, in the order of their end
        self._dropped: dict[Key, None] = {}  # of these, the ones with a dropped result, in the order of dropping
        self._ended: dict[Key, None] = {}  # keys of other runs that have ended, in the order of forgetting
        self._callers: dict[int, _Caller] = {}  # by their incarnation
        self._running: dict[RequestKey, _Run] = {}  # of these, the ones that have not ended, by their latest request
        self._nbytes = 0
        self._is_timer_set = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes of the results that are kept."""
        return self._nbytes

    def functions(self) -> dict[RequestKey, str]:
        """Return the names of the functions by their latest request. Takes no lock."""
        return {run.request: run.function for run in self._runs.copy().values()}

    def enter(
        self,
        key: Key,
        function: str,
        request: RequestKey,
        window: float,
        deadline: float = math.inf,
        open_runs: Sequence[int] = (),
    ) -> tuple[_Run, CallFuture[Any] | None]:
        """Return the run of a key, and its future; None if it begins now.

        Args:
            key: The key.
            function: Name of the function.
            request: The request.
            window: Seconds for which the result is kept.
            deadline: Deadline of the request, at which the result is forgotten.
            open_runs: Oldest runs that are open at the caller (`telegrad.worker.calls.settled`); none if unknown.

        Raises:
            TelegradError: The run has ended, or may have, and its result was dropped.
        """
        if open_runs:
            self._settle(key[0], open_runs)
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                if key in self._ended or self._is_settled(key):
                    raise TelegradError(
                        f"this worker has forgotten the result of {function}, because the last attempt of its call was"
                        " too long ago. The function may have run, and does not run again. Make another call if that"
                        " is harmless."
                    )
                run = self._runs[key] = self._running[request] = _Run(function, request, window, deadline)
                return run, None
            if run.future is None:
                raise TelegradError(
                    f"the result of {run.function} was dropped, because this worker keeps at most {_MOST_RESULTS}"
                    f" results for calls with a Retry, and {self.max_bytes} bytes of them (option retry_results_bytes)."
                    " The function has run, and does not run again. Make fewer such calls at a time, return less, or"
                    " raise the option."
                )
            if self._running.pop(run.request, None) is not None:
                self._running[request] = run
            run.request = request
            return run, run.future

    def complete(self, key: Key, run: _Run, value: object, error: BaseException | None) -> None:
        """Remember how a run has ended."""
        future = run.future
        assert future is not None
        nbytes = _FIXED_BYTES + _nbytes(value)  # without the lock: this may run code of the program
        with self._lock:
            self._running.pop(run.request, None)
            sets_timer, after, dropped = False, 0.0, []
            if run.canceled or self._is_settled(key):
                self._runs.pop(key, None)
            elif self._runs.get(key) is run:
                now = self._clock()
                run.expires = min(run.deadline, now + run.window)
                run.nbytes = nbytes
                self._nbytes += nbytes
                self._results[key] = run
                heapq.heappush(self._callers.setdefault(key[0], _Caller()).results, key[1])
                dropped = self._drop_oldest()
                sets_timer, self._is_timer_set = not self._is_timer_set, True
                after = run.expires - now
        del dropped  # without the lock: finalizers of the program may run
        if error is None:
            future._succeed(value)
        else:
            future._fail(error)
        if sets_timer:
            self._later(max(after, 0.0), self.forget_expired)

    def forget(self, key: Key, run: _Run, error: BaseException) -> None:
        """Forget a run that has been canceled; requests that wait for it fail."""
        with self._lock:
            self._running.pop(run.request, None)
            self._runs.pop(key, None)
        if run.future is not None:
            run.future._fail(error)

    def cancel(self, request: RequestKey) -> None:
        """Cancel a run for the caller of its latest request; nothing for other requests."""
        with self._lock:
            run = self._running.get(request)
        if run is not None:
            run.end()

    def forget_caller(self, incarnation: int) -> None:
        """Forget the results of a caller that is gone, and cancel its functions that run."""
        with self._lock:
            found = {key: run for key, run in self._runs.items() if key[0] == incarnation}
            running = [run for run in found.values() if not run.has_ended]
            dropped = [self._pop(key) for key, run in found.items() if run.has_ended]
            self._callers.pop(incarnation, None)
            for key in [key for key in self._ended if key[0] == incarnation]:
                del self._ended[key]
        del dropped
        for run in running:
            run.end()

    def close(self) -> None:
        """Forget all runs: the worker has closed."""
        with self._lock:
            dropped = self._runs, self._results
            self._runs, self._results = {}, {}
            self._running.clear()
            self._dropped.clear()
            self._ended.clear()
            self._callers.clear()
            self._nbytes = 0
        del dropped

    def forget_expired(self) -> None:
        """Forget the runs that no caller asks for, and set the next timer."""
        with self._lock:
            now = self._clock()
            expired = [self._end(key) for key, run in list(self._runs.items()) if run.expires <= now]
            left = min((run.expires for run in self._runs.values()), default=math.inf)
            self._is_timer_set = left != math.inf
        del expired
        if left != math.inf:
            self._later(left - now, self.forget_expired)

    def _drop_oldest(self) -> list[object]:
        """Drop the oldest results while there are too many, except the last one."""
        dropped: list[object] = []
        while len(self._results) > 1 and (len(self._results) > _MOST_RESULTS or self._nbytes > self.max_bytes):
            key = next(iter(self._results))
            run = self._results.pop(key)
            self._nbytes -= run.nbytes
            run.nbytes = 0
            self.drops += 1
            dropped.append(run.future)
            run.future = None
            self._dropped[key] = None
            if len(self._dropped) > _MOST_DROPPED:
                self._end(next(iter(self._dropped)), is_early=True)
        return dropped

    def _end(self, key: Key, is_early: bool = False) -> _Run:
        """Forget all of a run but its key, if its caller may ask again."""
        run = self._pop(key)
        if is_early or run.expires < run.deadline:
            self._ended[key] = None
        while len(self._ended) > _MOST_ENDED:
            caller, number = next(iter(self._ended))
            del self._ended[caller, number]
            self._callers.setdefault(caller, _Caller()).settled.add_up_to(number)
        return run

    def _settle(self, incarnation: int, open_runs: Sequence[int]) -> None:
        """Forget the runs of a caller that are settled."""
        dropped, kept = [], []  # dropped: freed without the lock, since finalizers of the program may run
        with self._lock:
            caller = self._callers.setdefault(incarnation, _Caller())
            caller.settled.add(open_runs)
            while caller.results and caller.results[0] < caller.settled.bound:
                number = heapq.heappop(caller.results)
                if number not in caller.settled:
                    kept.append(number)
                elif (incarnation, number) in self._runs:
                    dropped.append(self._pop((incarnation, number)))
            for number in kept:
                heapq.heappush(caller.results, number)

    def _is_settled(self, key: Key) -> bool:
        return key[0] in self._callers and key[1] in self._callers[key[0]].settled

    def _pop(self, key: Key) -> _Run:
        run = self._runs.pop(key)
        self._results.pop(key, None)
        self._dropped.pop(key, None)
        self._nbytes -= run.nbytes
        return run


class RememberingWorker(Protocol):
    """`telegrad.worker.worker.Worker`, as this module uses it."""

    engine: AnyEngine
    loop: EventLoop
    remembered_runs: RememberedRuns


def run_once(
    key: Key, terms: Terms, function: bytes | Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
) -> Any:
    """Run a function, or return the result of its run by an earlier request.

    Args:
        key: The run.
        terms: Seconds for which the result is kept, and the oldest runs that are open at the caller.
        function: The function's name in messages, or the function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result, or a coroutine of it.
    """
    scope = current.get()
    assert scope is not None
    worker: RememberingWorker = scope.worker
    runs, request = worker.remembered_runs, (scope.connection, scope.call)
    callee: Any = callee_of(function)
    deadline = scope.deadline / 1e9 if scope.deadline else math.inf
    window, open_runs = terms
    run, result_of_run = runs.enter(key, full_name_of(callee), request, window, deadline, open_runs)
    if result_of_run is not None:
        return _result_of(result_of_run)
    was_asked = False

    def is_canceled() -> bool:
        nonlocal was_asked
        if not run.canceled and not _is_canceled(worker, run.request):
            return False
        was_asked = True
        return True

    token = not_needed.set(is_canceled)
    try:
        result = run_function(callee, args, kwargs)
        deferred = deferred_result(callee, result)
        if deferred is not None:
            return _follow(worker, key, run, deferred)
    except BaseException as error:  # SystemExit too: the caller gets a reply
        if process_hooks.forked:
            raise
        runs.complete(key, run, None, error)
        raise
    finally:
        not_needed.reset(token)
    if was_asked:  # the function may have returned early
        runs.forget(key, run, _canceled())
    else:
        runs.complete(key, run, result, None)
    return result


def _is_canceled(worker: RememberingWorker, request: RequestKey) -> bool:
    """Return whether the caller has canceled a request.

    The end of its session marks it as canceled too, but closes the connection first.
    """
    return worker.engine.is_canceled(*request) and worker.engine.is_open(request[0])


def _canceled() -> RuntimeError:
    return RuntimeError("the call was canceled")


async def _result_of(run: CallFuture[Any]) -> object:
    """Await the result of a run, which the end of this request does not cancel."""
    return await run


def _follow(worker: RememberingWorker, key: Key, run: _Run, result: DeferredResult) -> Coroutine[Any, Any, object]:
    """Remember a deferred result once it is done, and return a coroutine of it."""
    runs = worker.remembered_runs
    future = run.future
    assert future is not None

    def ended(value: object, error: BaseException | None) -> None:
        if run.canceled and isinstance(error, Cancelled):
            runs.forget(key, run, error)
        else:
            runs.complete(key, run, value, error)

    def done(future: Future[object]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            ended(None, error)
        else:
            ended(value, None)

    if isinstance(result, Coroutine):
        state = caller_flags(), caller_state()
        run.cancel = worker.loop.run(result, current.get(), *state, tracing.recording.get(), ended)
    else:
        result.add_done_callback(done)
        if isinstance(result, CallFuture):
            run.cancel = result.cancel
    if run.canceled:  # meanwhile
        run.end()
    return _result_of(future)


def _nbytes(value: object) -> int:
    """Estimate the bytes of the tensors and texts in a value; 0 if it does not tell."""
    try:
        if isinstance(value, (str, bytes, bytearray)):
            return len(value)
        if isinstance(value, (tuple, list)):
            return sum(map(_nbytes, value)) + 8 * len(value)
        if isinstance(value, dict):
            return sum(map(_nbytes, value.values())) + 16 * len(value)
        nbytes = getattr(value, "nbytes", None)  # of tensors, arrays and views
        return nbytes if isinstance(nbytes, int) else 0
    except Exception:  # of a sparse tensor, a list that contains itself, or a property of the program
        return 0


carriers[run_once] = CallCarrier("retry")

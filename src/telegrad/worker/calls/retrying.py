"""Calls that are made again after a loss, by their `Retry`."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, UnknownWorker, WorkerLost
from telegrad.worker.calls.callables import full_name_of, name_of
from telegrad.worker.calls.client import Calls
from telegrad.worker.calls.future import CallFuture
from telegrad.worker.calls.pending_work import PendingWork
from telegrad.worker.calls.retry_policy import Retry, require_retry
from telegrad.worker.calls.settled import MOST_LISTED
from telegrad.worker.membership.members import Members
from telegrad.worker.scope import Scope, caller_flags, caller_state, current, handler_state, remaining
from telegrad.worker.timers import Timers

__all__ = ["Retries", "start_retrying"]

_WINDOW = 300.0  # s after its end, and before the next attempt, for which the callee keeps a result

_numbers = itertools.count(1)


class Retries:
    """Calls with a `Retry` of one worker.

    Args:
        run_once: Function of the callee that runs a function once, `telegrad.worker.serving.once.run_once`.
    """

    def __init__(self, run_once: Callable[..., object]) -> None:
        self.run_once: Callable[..., object] = run_once
        self._calls: dict[int, RetryingCall] = {}
        self._open_runs: dict[str, dict[int, None]] = {}  # by the callee's name; numbers in ascending order
        self._is_closed = False
        self._lock = threading.Lock()  # for `_is_closed` and `_open_runs`

    def add(self, number: int, call: "RetryingCall") -> None:
        """Add a call that has begun; end it at once if the worker has closed."""
        with self._lock:
            if not self._is_closed:
                self._calls[number] = call
                return
        call.work.close()

    def remove(self, number: int) -> None:
        """Remove a call that has ended."""
        self._calls.pop(number, None)

    def open_run(self, call: "RetryingCall") -> None:
        """Number the function's run of a call; later runs have larger numbers."""
        with self._lock:
            self._number(call)

    def renew_run(self, call: "RetryingCall") -> None:
        """Number another run of a call, unless the call has ended."""
        with self._lock:
            if self._settle(call):
                self._number(call)

    def settle_run(self, call: "RetryingCall") -> None:
        """Record that no request will ask for the run of a call again."""
        with self._lock:
            self._settle(call)

    def open_runs(self, callee: str) -> tuple[int, ...]:
        """Return the oldest open runs of a callee, at most `MOST_LISTED`, in order."""
        with self._lock:
            return tuple(itertools.islice(self._open_runs.get(callee, ()), MOST_LISTED))

    def describe(self) -> tuple[str, ...]:
        """Return a text for each call. Takes no lock."""
        return tuple(call.describe() for call in self._calls.copy().values())

    def functions(self) -> dict[int, str]:
        """Return the functions by the call of their latest attempt. Takes no lock."""
        return {call.attempt: call.function for call in self._calls.copy().values()}

    def close(self) -> None:
        """End all calls: the worker has closed, and its timers end."""
        with self._lock:
            self._is_closed = True
        for call in self._calls.copy().values():
            call.work.close()

    def _number(self, call: "RetryingCall") -> None:
        call.run = next(_numbers)
        self._open_runs.setdefault(call.callee, {})[call.run] = None

    def _settle(self, call: "RetryingCall") -> bool:
        """Return whether the run was open."""
        runs = self._open_runs.get(call.callee, {})
        was_open = runs.pop(call.run, 0) is None
        if not runs:
            self._open_runs.pop(call.callee, None)
        return was_open


class Pool(Protocol):
    """Thread pool of a worker, as this module uses it."""

    def submit(self, job: Callable[..., None], /, *arguments: object) -> None:
        """Run a function on a thread of the pool."""


class RetryingWorker(Protocol):
    """`telegrad.worker.worker.Worker`, as this module uses it."""

    incarnation: int
    members: Members
    calls: Calls
    retries: Retries
    timers: Timers

    @property
    def pool(self) -> Pool: ...


class RetryingCall:
    """Call that may need several attempts, one after the other.

    The later attempts run on pool threads, in the scope and torch state of the caller.

    Args:
        worker: The caller.
        to: Name, id or info of the callee. A worker that takes the name of a lost callee replaces it.
        function: The function.
        args: Its positional arguments. They have to stay unchanged until the call ends.
        kwargs: Its keyword arguments.
        timeout: Limit of all attempts together in ns; 0 for none.
        retry: The policy.
        once: The callee remembers the result, and runs the function once.
    """

    def __init__(
        self,
        worker: RetryingWorker,
        to: object,
        function: Callable[..., Any],
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        timeout: int,
        retry: Retry,
        once: bool,
    ) -> None:
        info = worker.members.resolve_any(to)
        timeout = remaining(timeout, current.get())
        self.text: str = f"{name_of(function)} on {info.name}"
        self._worker = worker
        self.callee: str = info.name
        self._callee_id = info.id
        self._process = worker.members.last_lost(info.id)  # the group may forget a worker that has left
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._retry = retry
        self._once = once
        self._number = next(_numbers)
        self.run: int = 0  # number of the function's run; another one after an error of the function
        self._attempt = 0
        self._timeout = timeout
        self._deadline = time.monotonic_ns() + timeout if timeout else 0
        self._flags, self._autocast = caller_flags(), caller_state()
        self.future: CallFuture[Any] = worker.calls.future_of(info.id, function, timeout)
        self.work: PendingWork = PendingWork(self.future, self.text)
        self._context = copy_context()
        scope = current.get()
        scope = Scope(worker, 0, 1) if scope is None else scope._replace(depth=max(scope.depth, 1), request=False)
        self._context.run(current.set, scope)

    def start(self, pause: float) -> CallFuture[Any]:
        """Make the first attempt, and return the future of the call.

        Args:
            pause: Seconds until then; the timeout begins afterwards.
        """
        retries = self._worker.retries
        retries.add(self._number, self)
        if self._once:
            retries.open_run(self)
        try:
            if pause:
                self._deadline += int(pause * 1e9) if self._deadline else 0
                self._send_later(pause)
            else:
                self._send()
        except WorkerLost as error:  # it is known to be lost, and may come back under its name
            self._on_error(error)
        except BaseException:
            self._end()
            raise
        self.future._on_done(lambda _: self._end())
        return self.future

    def _end(self) -> None:
        retries = self._worker.retries
        retries.remove(self._number)
        retries.settle_run(self)

    @property
    def function(self) -> str:
        """Name of the function."""
        return full_name_of(self._function)

    @property
    def attempt(self) -> int:
        """Id of the call that is the latest attempt; 0 for none."""
        return 0 if self.future._source is None else self.future._source._call_id()

    def describe(self) -> str:
        """Return a text for people."""
        return f"{self.text} (attempt {self._attempt} of {self._retry.attempts})"

    # ---- attempts

    def _send(self) -> None:
        """Make an attempt, in the scope and torch state of the caller."""
        self._attempt += 1
        timeout = max(self._deadline - time.monotonic_ns(), 1) if self._deadline else 0
        function, args, kwargs = self._function, self._args, self._kwargs
        if self._once:
            function, args, kwargs = self._worker.retries.run_once, self._remembered(), None
        attempt: CallFuture[Any] = self._worker.calls.client.start(self.callee, function, args, kwargs, timeout)
        attempt._mark_read()  # the program's future logs a failure
        self.future._source = attempt
        self.work.add(attempt.cancel)
        attempt._on_done(self._on_end)

    def _remembered(self) -> tuple[object, ...]:
        """Return the arguments of `run_once`."""
        return (
            (self._worker.incarnation, self.run),
            (_WINDOW + self._retry.max_backoff, self._worker.retries.open_runs(self.callee)),
            self._worker.calls.name_or_function(self._function),
            tuple(self._args or ()),
            dict(self._kwargs or {}),
        )

    def _on_end(self, attempt: CallFuture[Any]) -> None:
        error = attempt.failure()
        if error is None:
            self.work.succeed(attempt.value())
        elif self.work.error is None:
            try:
                self._on_error(error)
            except (
                BaseException
            ) as e:  # as of a policy's `covers`, or of a thread that cannot start: torch would drop it
                self._fail(e)

    def _on_error(self, error: BaseException) -> None:
        """Make the next attempt after a pause, or fail."""
        retry = self._retry
        if self._attempt >= retry.attempts or not retry.covers(error):
            self._fail(error)
            return
        pause = retry.pause(self._attempt)
        if self._deadline and time.monotonic_ns() + int(pause * 1e9) >= self._deadline:
            self._fail(error)
            return
        if self._once and isinstance(error, RemoteError):  # the function has ended: it is to run again
            self._worker.retries.renew_run(self)
        self._send_later(pause)

    def _send_later(self, pause: float) -> None:
        # The thread of the timers runs no code of the program, such as pickling.
        self._worker.timers.call_later(pause, lambda: self._worker.pool.submit(self._send_again))

    def _send_again(self) -> None:
        if self.work.error is None:
            self._context.run(self._send_in_state)

    def _send_in_state(self) -> None:
        try:
            with handler_state(self._flags, self._autocast):
                self._send()
        except WorkerLost as error:
            self._on_error(error)
        except UnknownWorker as error:  # it has left, and may come back under its name
            process = self._worker.members.last_lost(self._callee_id) or self._process
            lost = WorkerLost(self.callee, "it has left the group", process)
            lost.__cause__ = error
            self._on_error(lost)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, RpcTimeout) and not isinstance(error, RemoteError):
            error = RpcTimeout(self._timeout / 1e9, self.text, error.state)
        elif isinstance(error, NotInitialized) and not isinstance(error, RemoteError):
            self.work.close()  # the attempt's own error names `run_once`
            return
        elif self._attempt > 1:
            error.add_note(f"in attempt {self._attempt} of {self._retry.attempts} of {self.text}")
        self.work.fail(error)


def start_retrying(
    worker: RetryingWorker,
    to: object,
    function: Callable[..., Any],
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    timeout: float,
    retry: Retry,
    once: bool = True,
    pause: float = 0.0,
) -> CallFuture[Any]:
    """Start a call that is made again after a loss.

    Args:
        worker, to, function, args, kwargs, retry, once: As of `RetryingCall`.
        timeout: Limit of all attempts together in seconds; -1 for the default, 0 for none.
        pause: Seconds until the first attempt.

    Raises:
        TypeError: `retry` is no `Retry`.
        Exception: Whatever the first attempt raises; the future raises the rest.
    """
    require_retry(retry)
    return RetryingCall(worker, to, function, args, kwargs, worker.calls.timeout(timeout), retry, once).start(pause)

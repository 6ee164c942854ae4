"""Work behind a future that is not one call.

It is a chain of interceptors, or a delayed call.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from telegrad import _core
from telegrad.errors import Cancelled, NotInitialized
from telegrad.worker.calls.future import CallFuture

__all__ = ["Delay", "OpenWork", "PendingWork", "Submit"]

Delay = Callable[[float, Callable[[], object]], None]
"""Runs a function after some seconds, on a thread that runs no code of the program."""

Submit = Callable[..., None]
"""Runs a function with its arguments on a pool thread."""

_add_done_callback = torch._C.Future.add_done_callback  # bypasses the count of the program's callbacks


class PendingWork:
    """Work that completes a future, and that the future cancels.

    The future is completed once: by the result, a cancellation or a timeout, whichever comes first. Thread-safe.

    Args:
        future: The future to complete.
        call: Function and callee, for the errors.
        is_cancelable: False for creations, whose value other workers may use.
    """

    def __init__(self, future: CallFuture[Any], call: str, is_cancelable: bool = True) -> None:
        self.call: str = call
        self.error: BaseException | None = None  # what ended the work early
        self._future: CallFuture[Any] | None = future  # until it is completed
        self._parts: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        if is_cancelable:
            future._cancel_work = self.cancel
        else:
            future._work = self

    def add(self, cancel: Callable[[], object]) -> None:
        """Add a part of the work; cancel it at once if the work has ended early.

        Args:
            cancel: Cancels the part, in any thread; does nothing once the part has ended.
        """
        with self._lock:
            if self.error is None:
                self._parts.append(cancel)
                return
        cancel()

    def require_open(self) -> None:
        """Raise what ended the work early.

        Raises:
            Cancelled, RpcTimeout: The work was canceled or has exceeded its timeout.
        """
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Cancel all parts, and complete the future with `Cancelled`.

        Returns:
            False if the future has been completed.
        """
        return self.end(Cancelled(self.call))

    def end(self, error: BaseException) -> bool:
        """Cancel all parts, and complete the future with an error.

        Returns:
            False if the future has been completed.
        """
        future = self._take(error)
        if future is None:
            return False
        parts, self._parts = self._parts, []
        try:
            for cancel in reversed(parts):
                cancel()
        finally:
            future._fail(error)
        return True

    def close(self) -> None:
        """End the work because its worker has closed."""
        self.end(NotInitialized.closed(f"{self.call} was pending when this worker shut down."))

    def succeed(self, value: object) -> bool:
        """Complete the future with a value; False if it has been completed."""
        future = self._take()
        if future is not None:
            future._succeed(value)
        return future is not None

    def fail(self, error: BaseException) -> bool:
        """Complete the future with an error; False if it has been completed."""
        future = self._take()
        if future is not None:
            future._fail(error.with_traceback(None))
        return future is not None

    def follow(
        self,
        source: Future[Any],
        check: Callable[[object], None] | None = None,
        on_unused: Callable[[], None] | None = None,
    ) -> None:
        """Complete the future like another one.

        Args:
            source: The other future.
            check: Raises an error for values that are not valid.
            on_unused: Runs if a value arrives after the work has ended early.
        """

        def complete(done: Future[Any]) -> None:
            try:
                value = done.value()
                if check is not None:
                    check(value)
            except BaseException as e:  # SystemExit too, which a handler raised
                self.fail(e)
            else:
                if not self.succeed(value) and on_unused is not None:
                    on_unused()

        _add_done_callback(source, _core.shielded(complete))

    def _take(self, error: BaseException | None = None) -> CallFuture[Any] | None:
        """Return the future to its only completer; None if it has been taken."""
        with self._lock:
            future, self._future = self._future, None
            if future is not None:
                self.error = error
                if error is None:
                    self._parts = []
        if future is not None:
            future._source = None
        return future


class OpenWork:
    """Pending work of one worker that only a timer, or the end of the worker, may end.

    Args:
        delay: Runs a function later.
        submit: Runs a function on a pool thread: completing a future runs callbacks of the program.
    """

    def __init__(self, delay: Delay, submit: Submit) -> None:
        self.delay: Delay = delay
        self._submit = submit
        self._work: weakref.WeakSet[PendingWork] = weakref.WeakSet()  # its future, or a timer, keeps it
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, work: PendingWork) -> None:
        """Add work, which the end of the worker ends."""
        with self._lock:
            if not self._is_closed:
                self._work.add(work)
                return
        work.close()

    def run_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        """Run a function on a pool thread after a delay; never after `close`."""
        self.delay(seconds, lambda: self._submit(function, *arguments))

    def close(self) -> None:
        """End all work: the worker has closed, and its timers end."""
        with self._lock:
            self._is_closed, work = True, list(self._work)
        for each in work:
            each.close()

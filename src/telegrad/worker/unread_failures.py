"""Failures that the program has not retrieved, and their log lines.

A finalizer runs wherever the last reference is dropped, also inside a logging call of the same thread. So a finalizer
only appends to a deque. A pool thread of a worker logs the entries; without a worker, interpreter exit does.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from telegrad.errors import NotInitialized, WorkerLost
from telegrad.serialize.tracebacks import text_of
from telegrad.worker.closed import WorkerCalls

__all__ = ["CallSummary", "Failure", "describe_call", "discard_unread", "log_unread"]

logger: logging.Logger = logging.getLogger("telegrad")

CallSummary: TypeAlias = tuple[int, object, int]  # peer, called function or its name, timeout in ns
_unread: deque[tuple[CallSummary | None, BaseException | None, str]] = deque()


class Failure:
    """Failure of a future or a creation; only failures pay for a finalizer.

    Args:
        error: The exception; None if the owner of a reference has it.
        read: The program has retrieved the failure.
        request: The call; None if it is unknown.
        unread_action: What the program has not done, for the log line.
        calls: Calls of the worker that logs the failure; None if there is none.
    """

    __slots__ = ("calls", "error", "read", "request", "unread_action")

    def __init__(
        self,
        error: BaseException | None,
        read: bool,
        request: CallSummary | None,
        unread_action: str,
        calls: WorkerCalls | None,
    ) -> None:
        self.error: BaseException | None = error
        self.read: bool = read
        self.request: CallSummary | None = request
        self.unread_action: str = unread_action
        self.calls: WorkerCalls | None = calls

    def __del__(self) -> None:
        if self.read or _is_known(self.error):
            return
        _unread.append((self.request, self.error, self.unread_action))
        if self.calls is not None:
            self.calls.engine.request_callback(0)


def _is_known(error: BaseException | None) -> bool:
    """Return whether the program knows the cause: a shutdown, or a logged loss."""
    return isinstance(error, NotInitialized) or (isinstance(error, WorkerLost) and not error.unreached)


def log_unread() -> None:
    """Log the collected failures. Call this where logging is allowed."""
    while True:
        try:
            request, error, unread_action = _unread.popleft()
        except IndexError:
            return
        if error is None:
            detail = "; its owner has logged the error (telegrad.remote, at the option remote_error_level)"
        else:
            detail = f": {type(error).__name__}: {text_of(error)}"
        logger.warning("%s failed, and the program did not %s%s", describe_call(request), unread_action, detail)


def describe_call(request: CallSummary | None) -> str:
    """Return the name of the called function, for messages."""
    if request is None:
        return "a call"
    function = request[1]
    try:
        return str(getattr(function, "__qualname__", function))
    except BaseException:  # from the program's own methods
        return type(function).__qualname__


discard_unread: Callable[[], None] = _unread.clear  # for a forked child: the failures belong to the parent

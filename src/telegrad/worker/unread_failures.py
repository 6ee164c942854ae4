"""Failures that the program has not looked at: finalizers find them, and a thread that may log tells of them.

A finalizer runs wherever the last reference goes, also inside of a logging call of the same thread. So it only appends
to a deque. A thread of a worker's pool logs what is there; where there is no worker any more, the end of the
interpreter does.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from telegrad.errors import NotInitialized, WorkerLost
from telegrad.serialize.tracebacks import text_of

__all__ = ["Failure", "describe_call", "discard_unread", "log_unread"]

logger: logging.Logger = logging.getLogger("telegrad")

_unread: deque[tuple[Any, BaseException | None, str]] = deque()


class Failure:
    """The failure of a future or a creation; only what failed pays for a finalizer.

    Args:
        error: None where the owner of a reference has it.
        read: the program knows.
        request: (peer, what was called or its name, time-out in ns).
        how: what the program has not done.
        calls: of the worker whose pool is to tell of it; None if there is none.
    """

    __slots__ = ("calls", "error", "how", "read", "request")

    def __init__(self, error: BaseException | None, read: bool, request: Any, how: str, calls: Any) -> None:
        self.error: BaseException | None = error
        self.read: bool = read
        self.request: Any = request
        self.how: str = how
        self.calls: Any = calls

    def __del__(self) -> None:
        if self.read or _is_known(self.error):
            return
        _unread.append((self.request, self.error, self.how))
        if self.calls is not None:
            self.calls.engine.nudge(0)


def _is_known(error: BaseException | None) -> bool:
    """Does the program know of the cause? It has ended the worker itself, or the log has a line about the lost one."""
    return isinstance(error, NotInitialized) or (isinstance(error, WorkerLost) and not error.unreached)


def log_unread() -> None:
    """Logs the failures that finalizers have found. To be called where logging is allowed."""
    while True:
        try:
            request, error, how = _unread.popleft()
        except IndexError:
            return
        if error is None:
            told = "; its owner has logged the error (telegrad.remote, at the option remote_error_level)"
        else:
            told = f": {type(error).__name__}: {text_of(error)}"
        logger.warning("%s failed, and nobody %s%s", describe_call(request), how, told)


def describe_call(request: Any) -> str:
    """What was called, for messages."""
    if request is None:
        return "a call"
    what = request[1]
    try:
        return str(getattr(what, "__qualname__", what))
    except BaseException:  # of the program's own methods
        return type(what).__qualname__


discard_unread: Callable[[], None] = _unread.clear  # in a forked child: they are the parent's

"""Requests that the threads of a pool run, as other threads see them.

A pool thread runs in a context of its own (`ThreadPool.contexts`). Its scope, which the native server sets, names the
request. So the path of a call keeps no records for these snapshots.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType

from telegrad.worker.calls import callables, interceptors
from telegrad.worker.scope import current
from telegrad.worker.serving import intercepted
from telegrad.worker.serving.thread_pool import ThreadPool

__all__ = ["NATIVE_FUNCTION", "RunningHandlers", "RunningRequest"]

NATIVE_FUNCTION = "a native function"
"""Name of a handler without Python code: the interpreter does not show it."""

_BASE: CodeType = ThreadPool._serve.__code__  # its frame called the native server, which called the handler
_WITHIN_INTERCEPTORS: CodeType = intercepted.InterceptedHandler._run.__code__
_AROUND_HANDLERS = {callables.__file__, interceptors.__file__, intercepted.__file__}

_Line = tuple[str, int, str]  # file, line number, function


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """Request that a thread of the pool runs.

    Attributes:
        key: its connection and its call.
        function: name of the handler, `NATIVE_FUNCTION` if it has no Python code.
        thread: name of the thread.
        seen_for: seconds since this worker first saw it running; it has run for at least as long.
        time_left: seconds until its deadline; None without one.
        stack: file, line and function of its frames, outermost first.
    """

    key: tuple[int, int]
    function: str
    thread: str
    seen_for: float
    time_left: float | None
    stack: tuple[_Line, ...]

    def format_stack(self) -> str:
        """Return the stack as Python prints it; empty without Python code."""
        lines = [traceback.FrameSummary(file, line, name, lookup_line=False) for file, line, name in self.stack]
        return "".join(traceback.StackSummary.from_list(lines).format())


class RunningHandlers:
    """Running requests of one worker. Any thread may read them; takes no lock.

    Args:
        pool: The threads of the worker.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, pool: ThreadPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._first_seen: dict[tuple[int, int], float] = {}  # replaced as a whole: snapshots may be concurrent

    def snapshot(self) -> list[RunningRequest]:
        """Return the running requests, those first that were seen first."""
        now, monotonic_ns = self._clock(), time.monotonic_ns()
        frames = sys._current_frames()
        seen, requests = self._first_seen, []
        for thread, context in self._pool.contexts.copy().items():
            scope = context.get(current)
            if scope is None or not scope.request or thread.ident is None:
                continue
            key = (scope.connection, scope.call)
            function, stack = _handler_of(frames.get(thread.ident))
            left = (scope.deadline - monotonic_ns) / 1e9 if scope.deadline else None
            since = now - seen.get(key, now)
            requests.append(RunningRequest(key, function, thread.name, since, left, stack))
        del frames  # a frame keeps the arguments of its function
        self._first_seen = {request.key: now - request.seen_for for request in requests}
        return sorted(requests, key=lambda request: -request.seen_for)


def _handler_of(frame: FrameType | None) -> tuple[str, tuple[_Line, ...]]:
    """Return the name of the handler that a thread runs, and its stack."""
    stack: list[_Line] = []
    function, has_interceptors = NATIVE_FUNCTION, False
    for each in _above_base(frame):  # the handler is the outermost, or the outermost within the interceptors
        code = each.f_code
        stack.append((code.co_filename, each.f_lineno, code.co_name))
        has_interceptors = has_interceptors or code is _WITHIN_INTERCEPTORS
        if not has_interceptors and code.co_filename not in _AROUND_HANDLERS:
            function = f"{each.f_globals.get('__name__', '?')}.{code.co_qualname}"
    return function, tuple(reversed(stack))


def _above_base(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a pool thread above its base, innermost first."""
    while frame is not None and frame.f_code is not _BASE:
        yield frame
        frame = frame.f_back

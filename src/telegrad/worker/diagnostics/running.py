"""Requests that run, on threads or as coroutines, as other threads see them.

A pool thread runs in a context of its own (`ThreadPool.contexts`). Its scope, which the native server sets, names the
request; the engine has the caller, and the time at which the thread took it. So the path of a call keeps no records for
these snapshots. A coroutine has the scope of its request, too, and `DeferredRequest` the rest.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import CORO_RUNNING, getcoroutinestate
from types import CodeType, CoroutineType, FrameType

from telegrad import _core
from telegrad.worker.calls import callables, interceptors
from telegrad.worker.scope import Scope, current
from telegrad.worker.serving import intercepted, once
from telegrad.worker.serving.event_loop import DeferredRequest, EventLoop
from telegrad.worker.serving.thread_pool import ThreadPool

__all__ = ["NATIVE_FUNCTION", "RunningHandlers", "RunningRequest"]

NATIVE_FUNCTION = "a native function"
"""Name of a handler without Python code: the interpreter does not show it."""

_BASE: CodeType = ThreadPool._serve.__code__  # its frame called the native server, which called the handler
_WITHIN_INTERCEPTORS: CodeType = intercepted.InterceptedHandler._run.__code__
interceptors.around_handlers.update((callables.__file__, intercepted.__file__, once.__file__))

_Line = tuple[str, int, str]  # file, line number, function
_Handler = tuple[str, tuple[_Line, ...]]  # its name, and its stack, outermost first


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """Request that a thread of the pool or a coroutine runs.

    Attributes:
        key: its connection and its call.
        function: name of the handler, `NATIVE_FUNCTION` if it has no Python code.
        caller: name of the calling worker.
        thread: name of the thread.
        waits: whether its coroutine awaits something, so that the thread runs others.
        age: seconds since a thread took it.
        time_left: seconds until its deadline; None without one.
        stack: file, line and function of its frames, outermost first.
    """

    key: tuple[int, int]
    function: str
    caller: str
    thread: str
    waits: bool
    age: float
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
        loop: Its event loop.
        deferred: Returns the requests with a deferred result by connection and call.
        find_request: Returns what the engine knows of another request, by connection and call.
        name_of: Returns a worker's name by its id.
        clock: Monotonic clock in ns.
    """

    def __init__(
        self,
        pool: ThreadPool,
        loop: EventLoop,
        deferred: Callable[[], dict[tuple[int, int], DeferredRequest]],
        find_request: Callable[[int, int], _core.RequestSnapshot | None],
        name_of: Callable[[int], str],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._pool = pool
        self._loop = loop
        self._deferred = deferred
        self._find_request = find_request
        self._name_of = name_of
        self._clock = clock

    def snapshot(self) -> list[RunningRequest]:
        """Return the running requests, oldest first."""
        frames = _core.thread_frames()
        found = [*self._of_threads(frames), *self._of_coroutines(frames)]
        del frames  # a frame keeps the arguments of its function
        return sorted(found, key=lambda request: -request.age)

    def _of_threads(self, frames: dict[int, FrameType]) -> Iterator[RunningRequest]:
        for thread, context in self._pool.contexts.copy().items():
            scope = context.get(current)
            if scope is None or not scope.request or thread.ident is None:
                continue
            found = self._find_request(scope.connection, scope.call)
            if found is not None:  # else it has just been answered
                handler = _handler_of(_above_base(frames.get(thread.ident)))
                yield self._request(scope, handler, found.peer, found.since, thread.name, waits=False)

    def _of_coroutines(self, frames: dict[int, FrameType]) -> Iterator[RunningRequest]:
        thread, deferred = self._loop.thread, self._deferred()
        for coroutine, scope in self._loop.coroutines():
            found = None if scope is None else deferred.get((scope.connection, scope.call))
            if scope is None or found is None or thread is None or thread.ident is None:
                continue
            waits = getcoroutinestate(coroutine) != CORO_RUNNING
            function, stack = _handler_of(_frames_of(coroutine, frames.get(thread.ident)))
            handler = found.function if function == NATIVE_FUNCTION else function, stack
            yield self._request(scope, handler, found.peer, int(found.since * 1e9), thread.name, waits)

    def _request(
        self, scope: Scope, handler: _Handler, peer: int, since: int, thread: str, waits: bool
    ) -> RunningRequest:
        now = self._clock()
        function, stack = handler
        return RunningRequest(
            key=(scope.connection, scope.call),
            function=function,
            caller=self._name_of(peer),
            thread=thread,
            waits=waits,
            age=(now - since) / 1e9,
            time_left=(scope.deadline - now) / 1e9 if scope.deadline else None,
            stack=stack,
        )


def _handler_of(frames: Iterable[FrameType]) -> _Handler:
    """Return the name and the stack of the handler with these frames, innermost first."""
    stack: list[_Line] = []
    function, has_interceptors = NATIVE_FUNCTION, False
    for each in frames:  # the handler is the outermost, or the outermost within the interceptors
        code = each.f_code
        stack.append((code.co_filename, each.f_lineno, code.co_name))
        has_interceptors = has_interceptors or code is _WITHIN_INTERCEPTORS
        if not has_interceptors and code.co_filename not in interceptors.around_handlers:
            function = f"{each.f_globals.get('__name__', '?')}.{code.co_qualname}"
    return function, tuple(reversed(stack))


def _above_base(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a pool thread above its base, innermost first."""
    while frame is not None and frame.f_code is not _BASE:
        yield frame
        frame = frame.f_back


def _frames_of(coroutine: object, innermost: FrameType | None) -> list[FrameType]:
    """Return the frames of a coroutine and of what it awaits, innermost first.

    Args:
        coroutine: The coroutine; it may have ended.
        innermost: The frame that its thread executes.
    """
    frames: list[FrameType] = []
    while isinstance(coroutine, CoroutineType) and (frame := coroutine.cr_frame) is not None:
        if coroutine.cr_running:
            called: list[FrameType] = []
            while innermost is not None and innermost is not frame:
                called.append(innermost)
                innermost = innermost.f_back
            has_just_begun = innermost is None  # after the snapshot of the threads
            return [frame, *frames] if has_just_begun else [*called, frame, *frames]
        frames.insert(0, frame)
        coroutine = coroutine.cr_await
    return frames

"""Event loop of a worker, for ``async def`` handlers.

All coroutines of a worker share one thread; each step runs in the torch state of its caller. A coroutine that blocked
would stop the others, and would never end if it waited for one of them. So blocking calls in that thread raise an error
(`telegrad.worker.blocking`).
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Self, cast

from telegrad.errors import Cancelled, NotInitialized
from telegrad.worker import process_hooks
from telegrad.worker.blocking import this_thread
from telegrad.worker.calls.callables import full_name_of
from telegrad.worker.calls.tracing import Recording, recording
from telegrad.worker.scope import Autocast, Scope, caller_flags, caller_state, current
from telegrad.worker.serving.torch_state import CoroutineTorchState

__all__ = ["DeferredRequest", "EventLoop", "coroutine_is_canceled"]

logger: logging.Logger = logging.getLogger("telegrad")


class _StateSwapped(Coroutine[object, object, object]):
    """Coroutine that runs each step of another one in that one's torch state."""

    def __init__(self, coroutine: Coroutine[object, object, object], state: CoroutineTorchState) -> None:
        self._coroutine = coroutine
        self._state = state

    def send(self, value: object) -> object:
        with self._state:
            waits_for = self._coroutine.send(value)
        return self._checked(waits_for)

    def throw(self, *error: Any) -> object:
        try:
            with self._state:
                waits_for = self._coroutine.throw(*error)
        finally:
            del error  # breaks the cycle of error, traceback and frame, which holds the arguments of the handler
        return self._checked(waits_for)

    def close(self) -> None:
        with self._state:
            self._coroutine.close()

    def _checked(self, waits_for: object) -> object:
        if process_hooks.forked:
            process_hooks.leave_child(RuntimeError("a child that a coroutine has forked has no event loop to await on"))
        return waits_for

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        return self.send(None)

    def __await__(self) -> Generator[object, object, object]:
        return cast("Generator[object, object, object]", self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._coroutine, name)  # name and frame, for the descriptions of tasks


class _Lifetime:
    """Whether a handler was canceled or has ended.

    Apart from its job: the context of that refers to this.
    """

    __slots__ = ("has_ended", "is_canceled")

    def __init__(self) -> None:
        self.has_ended = self.is_canceled = False


_handler: ContextVar[_Lifetime | None] = ContextVar("telegrad_handler", default=None)
"""Lifetime of the handler that runs, or that has made the running task."""


def coroutine_is_canceled() -> bool:
    """Return whether the coroutine of this context was canceled.

    True also in the threads that the coroutine has started, and after its end. A task that outlives it is not canceled.
    """
    lifetime = _handler.get()
    return lifetime is not None and lifetime.is_canceled


class _TaskOfHandler(_StateSwapped):
    """Coroutine of a task that a handler has made, which may outlive the handler.

    The deadline and the cancellation of the request end with it: a batching loop that the first request starts serves
    the later ones, too.
    """

    def __init__(
        self, coroutine: Coroutine[object, object, object], state: CoroutineTorchState, handler: _Lifetime
    ) -> None:
        super().__init__(coroutine, state)
        self._handler = handler
        self._is_of_request = True

    def send(self, value: object) -> object:
        self._check_handler()
        return super().send(value)

    def throw(self, *error: Any) -> object:
        self._check_handler()
        return super().throw(*error)

    def _check_handler(self) -> None:
        """Leave the request, in the context of the task, if the handler has ended."""
        if self._is_of_request and self._handler.has_ended:
            self._is_of_request = False
            _handler.set(None)
            scope = current.get()
            if scope is not None:
                current.set(scope._replace(deadline=0))


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    """Make a task of a handler's coroutine, with the torch state of its creator.

    Torch's state is the thread's, which all coroutines of a worker share.
    """
    state = CoroutineTorchState(caller_flags(), caller_state(), current.get(), recording.get())
    handler = _handler.get()
    steps = _StateSwapped(coroutine, state) if handler is None else _TaskOfHandler(coroutine, state, handler)
    return asyncio.Task(steps, loop=loop, **options)


class _Job:
    """Coroutine that has been submitted."""

    __slots__ = ("canceled", "context", "coroutine", "ended", "lifetime", "started", "state", "task")

    def __init__(
        self,
        coroutine: Coroutine[object, object, object],
        state: CoroutineTorchState,
        context: Context,
        ended: Callable[[object, BaseException | None], None],
    ) -> None:
        self.coroutine = coroutine
        self.state = state
        self.context = context
        self.ended = ended
        self.started = self.canceled = False
        self.lifetime = _Lifetime()
        context.run(_handler.set, self.lifetime)
        self.task: asyncio.Task[None] | None = None

    def _is_canceled(self) -> bool:
        return self.canceled

    async def run(self) -> None:
        self.started = True
        if self._is_canceled():
            self.coroutine.close()
            self.ended(None, Cancelled())
            return
        loop = asyncio.get_running_loop()
        value: object = None
        error: BaseException | None = None
        try:
            value = await _StateSwapped(self.coroutine, self.state)
        except asyncio.CancelledError as e:  # by the caller, the worker shuts down, or user code raised it
            error = Cancelled() if self.canceled else RuntimeError(f"the handler was stopped: {e!r}")
        except BaseException as e:  # SystemExit too: the loop continues, and the caller gets a reply
            if loop.is_closed():  # the garbage collector closes the coroutine of an abandoned loop
                raise
            error = e
        self.lifetime.has_ended = True
        try:
            self.ended(value, error)
        finally:
            del error  # breaks the cycle of error and frame

    def cancel(self) -> None:
        """Cancel the coroutine once, in the loop's thread."""
        if self.canceled:
            return
        self.canceled = True
        self.lifetime.is_canceled = not self.lifetime.has_ended
        if self.started and self.task is not None:
            self.task.cancel()

    def cancel_unstarted(self) -> None:
        """Fail a coroutine that has not started."""
        self.coroutine.close()
        self.ended(None, RuntimeError("the handler was not run: its worker shuts down"))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has closed, and has ended all coroutines
        loop.call_soon_threadsafe(callback)


class DeferredRequest:
    """Request with a deferred result, and how to cancel its work.

    Args:
        peer: Id of the caller.
        handler: The function.
        deadline: Deadline of the request, monotonic ns; 0 for none.
    """

    def __init__(self, peer: int, handler: object, deadline: int) -> None:
        self.peer = peer
        self.handler = handler
        self.deadline = deadline
        self.name: str = ""  # of the program's function, if the handler is Telegrad's
        self.since: float = time.monotonic()
        self.canceled: bool = False  # the caller has canceled the request, or is lost
        self._cancel: Callable[[], object] | None = None

    @property
    def function(self) -> str:
        """Return the name of the function."""
        return self.name or full_name_of(self.handler)

    def begin(self, cancel: Callable[[], object]) -> None:
        """Set the function that cancels the work; call it if it was canceled meanwhile.

        Args:
            cancel: May be called twice, in any thread.
        """
        self._cancel = cancel
        if self.canceled:
            cancel()

    def cancel(self) -> None:
        """Cancel the work. Any thread may call this."""
        self.canceled = True
        if self._cancel is not None:
            self._cancel()


class EventLoop:
    """Event loop of one worker, in a thread that starts with the first coroutine.

    Args:
        worker: Name of the worker.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._name = f"telegrad-{worker}-loop"
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pending: deque[_Job] = deque()  # not started yet
        self._jobs: dict[asyncio.Task[None], _Job] = {}  # started, and not ended
        self._end_task: asyncio.Task[None] | None = None
        self._closed = False  # accepts no coroutines
        self._abandoned = False  # `stop` has not waited for the end
        self._stopping = False  # the thread is to leave the loop

    def run(
        self,
        coroutine: Coroutine[object, object, object],
        scope: Scope | None,
        flags: int,
        autocast: Autocast,
        recording: Recording | None,
        ended: Callable[[object, BaseException | None], None],
    ) -> Callable[[], None]:
        """Run a coroutine; `ended` gets its result or its exception in the loop's thread.

        Returns:
            A function that cancels the coroutine, in any thread. A coroutine that has not begun does not run.

        Raises:
            NotInitialized: The loop has been stopped.
        """
        context = copy_context()
        context.run(current.set, scope)
        with self._lock:
            if not self._closed:
                loop = self._loop or self._start()
                job = _Job(coroutine, CoroutineTorchState(flags, autocast, scope, recording), context, ended)
                self._pending.append(job)
                loop.call_soon_threadsafe(self._begin)
                return lambda: _call_soon(loop, job.cancel)
        coroutine.close()
        raise NotInitialized

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    @property
    def thread(self) -> threading.Thread | None:
        """The thread; None before the first coroutine."""
        return self._thread

    def coroutines(self) -> list[tuple[Coroutine[object, object, object], Scope | None]]:
        """Return the coroutines that have begun, with the scopes of their requests.

        Any thread may call this.
        """
        return [(job.coroutine, job.context.get(current)) for job in self._jobs.copy().values()]

    def stop(self, timeout: float) -> bool:
        """Cancel all coroutines and end the thread; False if that takes too long.

        Then the thread, a daemon, ends when it can.

        Args:
            timeout: Limit in seconds.
        """
        with self._lock:
            self._closed = True
            unstarted, self._pending = self._pending, deque()
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return True
        for job in unstarted:
            job.cancel_unstarted()
        if thread is threading.current_thread():  # a handler shuts its own worker down
            loop.call_soon(self._leave)
            return True
        loop.call_soon_threadsafe(self._end)
        thread.join(timeout)
        if not thread.is_alive():
            return True
        self._abandoned = True
        _call_soon(loop, self._leave)
        return False

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()
        loop.set_task_factory(_make_task)
        self._thread = threading.Thread(target=self._serve, args=(loop,), name=self._name, daemon=True)
        self._thread.start()
        return loop

    # ---- in the loop's thread

    def _begin(self) -> None:
        with self._lock:
            if not self._pending:  # `stop` has cancelled the coroutine
                return
            job = self._pending.popleft()
        job.task = task = asyncio.Task(job.run(), loop=asyncio.get_running_loop(), context=job.context)
        self._jobs[task] = job
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._jobs[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed with an internal error; please report it", self._name, exc_info=error)

    def _end(self) -> None:
        """Cancel all coroutines, then leave the loop."""

        async def end() -> None:
            tasks = list(self._jobs)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await loop.shutdown_asyncgens()
            self._leave()

        loop = asyncio.get_running_loop()
        if self._abandoned:
            self._leave()
        else:
            self._end_task = asyncio.Task(end(), loop=loop)  # the loop refers to tasks weakly

    def _leave(self) -> None:
        self._stopping = True
        asyncio.get_running_loop().stop()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        this_thread.worker = self._worker
        asyncio.set_event_loop(loop)
        try:
            while not self._stopping:
                self._run(loop.run_forever)
            left = asyncio.all_tasks(loop)  # of an abandoned loop, or of one that a coroutine has stopped
            for task in left:
                task.cancel()
            if left:
                ended = asyncio.gather(*left, return_exceptions=True)
                while not ended.done():
                    self._run(loop.run_until_complete, ended)
        finally:
            loop.close()
            del this_thread.worker

    def _run(self, run: Callable[..., object], *args: object) -> None:
        """Run the loop, also after SystemExit or KeyboardInterrupt in a task or callback.

        Asyncio raises these out of the loop; the other coroutines must continue.
        """
        try:
            run(*args)
        except BaseException:
            logger.exception("%s: a callback or a task of an async def handler raised", self._name)

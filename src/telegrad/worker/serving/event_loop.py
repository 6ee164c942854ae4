"""``async def`` handlers: they run on the worker's event loop, each in the state of its caller.

A coroutine that waits without ``await`` blocks its loop. The wait may depend on another coroutine of this worker,
through a call that leads back to it. So a blocking wait is announced (`blocking_in_loop`). If it takes long, coroutines
that have not started yet start on another loop.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from telegrad.errors import NotInitialized
from telegrad.worker import process_hooks
from telegrad.worker.calls.tracing import Recording
from telegrad.worker.scope import Scope, current
from telegrad.worker.serving.torch_state import CoroutineTorchState

__all__ = ["EventLoop", "blocking_in_loop"]

logger: logging.Logger = logging.getLogger("telegrad")

_PATIENCE = 0.005  # s that coroutines wait for a loop that is held up
_here = threading.local()  # .loop: (EventLoop, _LoopThread), in the threads of loops


class _StateSwapped:
    """Awaits a coroutine, running each of its steps in torch's state of its own."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], state: CoroutineTorchState) -> None:
        self._coroutine = coroutine
        self._state = state

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                with self._state:
                    waits_for = step(value)
            except StopIteration as e:
                return e.value
            if process_hooks.forked:
                process_hooks.leave_child(
                    RuntimeError("a child that a coroutine has forked has no event loop to await on")
                )
            try:
                value = yield waits_for
                step = self._coroutine.send
            except BaseException as e:
                value, step = e, self._coroutine.throw


class _Job(NamedTuple):
    """A coroutine that is to begin."""

    coroutine: Coroutine[Any, Any, Any]
    state: CoroutineTorchState
    context: Context
    ended: Callable[[Any, BaseException | None], None]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        value: Any = None
        error: BaseException | None = None
        try:
            value = await _StateSwapped(self.coroutine, self.state)
        except asyncio.CancelledError as e:  # because the worker shuts down, or user code raised it
            error = RuntimeError(f"the handler was stopped: {e!r}")
        except BaseException as e:  # SystemExit too: it must not end the loop, and the caller must hear
            if loop.is_closed():  # it was left behind, and is garbage now
                raise
            error = e
        try:
            self.ended(value, error)
        finally:
            del error  # its frames have this one

    def cancel_unstarted(self) -> None:
        self.coroutine.close()
        self.ended(None, RuntimeError("the handler was not run: its worker shuts down"))


class _LoopThread:
    """A loop and its thread, which sets `_here`. The last three are guarded by the lock of the `EventLoop`."""

    def __init__(self, owner: "EventLoop", name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self.pending: deque[_Job] = deque()
        self.load = 0  # coroutines that have not ended, whether begun or not
        self.waits = 0  # is it held up? A wait may be inside another: a signal handler's
        self._thread = threading.Thread(target=self._serve, args=(owner,), name=name, daemon=True)
        self._late = False
        self._stopping = False
        self._thread.start()

    def _serve(self, owner: "EventLoop") -> None:
        _here.loop = (owner, self)
        asyncio.set_event_loop(self.loop)
        try:
            while not self._stopping:
                self._run(self.loop.run_forever)
            left = asyncio.all_tasks(self.loop)  # of a loop that was left behind, or is ended by one of them
            for task in left:
                task.cancel()
            if left:
                ended = asyncio.gather(*left, return_exceptions=True)
                while not ended.done():
                    self._run(self.loop.run_until_complete, ended)
        finally:
            self.loop.close()
            del _here.loop

    def _run(self, run: Callable[..., Any], *args: Any) -> None:
        """Runs the loop, which SystemExit and KeyboardInterrupt of a callback or of a task leave (asyncio raises them
        there); what other coroutines are at goes on all the same."""
        try:
            run(*args)
        except BaseException:
            logger.exception("%s: a callback or a task of an async def handler raised", self._thread.name)

    def stop(self) -> None:
        """Ends the thread. To be called in it."""
        self._stopping = True
        self.loop.stop()

    def end(self) -> None:
        """Cancels what runs; then the thread ends."""

        async def end() -> None:
            tasks = list(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()
            self.stop()

        def begin_to_end() -> None:
            if self._late:
                self.stop()
            else:
                self.loop.create_task(end())

        if self._thread is threading.current_thread():  # a handler shuts its own worker down
            self.loop.call_soon(self.stop)
        else:
            self.loop.call_soon_threadsafe(begin_to_end)

    def join(self, timeout: float) -> bool:
        """Has the thread ended? Waits for it `timeout` seconds; afterwards it ends when it can."""
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        self._late = True
        with suppress(RuntimeError):  # the loop has been closed just now
            self.loop.call_soon_threadsafe(self.stop)
        return False


class EventLoop:
    """The loop of one worker, in a thread that starts at the first coroutine; and further ones while it is held up.

    Args:
        name: of the thread.
        pool: runs a function on a thread of the worker's pool.
        later: runs a function after some seconds.
    """

    def __init__(
        self, name: str, pool: Callable[..., None], later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._name = name
        self.pool = pool
        self._later = later
        self._lock = threading.Lock()
        self._threads: list[_LoopThread] = []  # the first one stays, others end with their last coroutine
        self._stopped = False
        self._warned = False

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        scope: Scope | None,
        flags: int,
        autocast: Any,
        recording: Recording | None,
        ended: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Runs it; on the loop's thread, `ended` gets its result or what it raised.

        Raises:
            NotInitialized: the loop has been stopped.
        """
        context = copy_context()
        context.run(current.set, scope)
        with self._lock:
            if not self._stopped:
                self._add(_Job(coroutine, CoroutineTorchState(flags, autocast, scope, recording), context, ended))
                return
        coroutine.close()
        raise NotInitialized

    def owns_current_thread(self) -> bool:
        """Is the calling thread one of these?"""
        here: tuple[EventLoop, _LoopThread] | None = getattr(_here, "loop", None)
        return here is not None and here[0] is self

    def stop(self, timeout: float) -> bool:
        """Cancels what runs and ends the threads; nothing runs here afterwards. False: a coroutine has not let go of
        its thread in `timeout` seconds. That thread, a daemon, then ends when it can."""
        with self._lock:
            self._stopped = True
            threads, self._threads = self._threads, []
            refused = [job for thread in threads for job in thread.pending]
            for thread in threads:
                thread.pending.clear()
                thread.end()
        for job in refused:
            job.cancel_unstarted()
        until = time.monotonic() + timeout
        in_time = [thread.join(max(0.0, until - time.monotonic())) for thread in threads]
        return all(in_time)

    # ---- with the lock held

    def _add(self, job: _Job) -> None:
        thread = next((t for t in self._threads if not t.waits), None)
        if thread is None:
            thread = self._threads[0] if self._threads else self._start()
        self._give(thread, job)
        if thread.waits:
            self._later(_PATIENCE, lambda: self._spill_over(thread))

    def _start(self) -> _LoopThread:
        more = f"-{len(self._threads) + 1}" if self._threads else ""
        thread = _LoopThread(self, self._name + more)
        self._threads.append(thread)
        return thread

    def _give(self, thread: _LoopThread, job: _Job) -> None:
        thread.load += 1
        thread.pending.append(job)
        thread.loop.call_soon_threadsafe(self._begin, thread)

    # ---- on the loop's thread

    def _begin(self, thread: _LoopThread) -> None:
        with self._lock:
            if not thread.pending:  # it has begun elsewhere
                return
            job = thread.pending.popleft()
        task = thread.loop.create_task(job.run(), context=job.context)
        thread.tasks.add(task)
        task.add_done_callback(lambda done: self._ended(thread, done))

    def _ended(self, thread: _LoopThread, task: "asyncio.Task[None]") -> None:
        thread.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s met an error that is Telegrad's own; please report it", self._name, exc_info=error)
        with self._lock:
            thread.load -= 1
            if not thread.load and thread in self._threads[1:]:
                self._threads.remove(thread)
                thread.stop()

    # ---- loops that are held up

    def enter_blocking(self, thread: _LoopThread) -> None:
        with self._lock:
            thread.waits += 1
            if thread.pending:
                self._later(_PATIENCE, lambda: self._spill_over(thread))

    def go_on(self, thread: _LoopThread) -> None:
        with self._lock:
            thread.waits -= 1

    def _spill_over(self, thread: _LoopThread) -> None:
        """If it is held up still, what has yet to begin there begins elsewhere."""
        with self._lock:
            if self._stopped or not thread.waits or not thread.pending:
                return
            free = next((t for t in self._threads if not t.waits), None) or self._start()
            while thread.pending:
                thread.load -= 1
                self._give(free, thread.pending.popleft())
            warn, self._warned = not self._warned, True
        if warn:
            logger.warning(
                "%s is held up: a coroutine waits without await (rpc_sync, wait, to_here). Coroutines that have yet to"
                " begin run on a further loop meanwhile; those that have begun wait for it. Await rpc_async there.",
                self._name,
            )


@contextmanager
def blocking_in_loop() -> Iterator[None]:
    """Around a wait that holds up its thread, for the case that it is a loop's."""
    here: tuple[EventLoop, _LoopThread] | None = getattr(_here, "loop", None)
    if here is None:
        yield
        return
    owner, thread = here
    owner.enter_blocking(thread)
    try:
        yield
    finally:
        owner.go_on(thread)

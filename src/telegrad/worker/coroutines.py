"""``async def`` handlers: they run on the worker's event loop, each in the state of its caller."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from telegrad.errors import NotInitialized
from telegrad.worker.scope import Scope, current
from telegrad.worker.steps import StepState

__all__ = ["EventLoop"]


class _Stepped:
    """Awaits a coroutine, running each of its steps in torch's state of its own."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], state: StepState) -> None:
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
            try:
                value = yield waits_for
                step = self._coroutine.send
            except BaseException as e:
                value, step = e, self._coroutine.throw


class EventLoop:
    """The loop of one worker, in a thread that starts at the first coroutine."""

    def __init__(self, name: str, pool: Callable[..., None]) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.pool = pool

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        scope: Scope | None,
        flags: int,
        autocast: Any,
        ended: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Runs it; on the loop's thread, `ended` gets its result or what it raised.

        Raises:
            NotInitialized: the loop has been stopped.
        """
        context = copy_context()
        context.run(current.set, scope)

        async def finish() -> None:
            try:
                value = await _Stepped(coroutine, StepState(flags, autocast))
            except asyncio.CancelledError as e:  # because the worker shuts down, or user code raised it
                ended(None, RuntimeError(f"the handler was stopped: {e!r}"))
            except BaseException as e:  # SystemExit too: it must not end the loop, and the caller must hear
                ended(None, e)
            else:
                ended(value, None)

        def begin(loop: asyncio.AbstractEventLoop) -> None:
            task = loop.create_task(finish(), context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop = self._started()
        if loop is None:
            coroutine.close()
            raise NotInitialized
        loop.call_soon_threadsafe(begin, loop)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Runs a function on the loop's thread after a while; never, if the loop has been stopped by then."""
        loop = self._started()
        if loop is not None:
            loop.call_soon_threadsafe(loop.call_later, seconds, function)

    def _started(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._loop is None and not self._stopped:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def stop(self, timeout: float) -> bool:
        """Cancels what runs and ends the thread; nothing runs here afterwards. False: a coroutine has not let go of it
        in `timeout` seconds. The thread, a daemon, then ends when it can."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = None
            self._stopped = True
        if loop is None or thread is None:
            return True

        async def end() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await loop.shutdown_asyncgens()
            loop.stop()

        late = False

        def begin_to_end() -> None:
            if late:
                loop.stop()
            else:
                loop.create_task(end())

        if thread is threading.current_thread():  # a handler shuts its own worker down
            loop.call_soon(loop.stop)
            return True
        loop.call_soon_threadsafe(begin_to_end)
        thread.join(timeout)
        if not thread.is_alive():
            return True
        late = True
        with suppress(RuntimeError):  # the loop has been closed just now
            loop.call_soon_threadsafe(loop.stop)
        return False

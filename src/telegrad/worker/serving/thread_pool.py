"""Threads that run handlers and callbacks.

The core assigns work to threads, and decides when another thread is needed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from telegrad import _core
from telegrad.internal_errors import log_internal_error
from telegrad.wire import WorkKind
from telegrad.worker import process_hooks
from telegrad.worker.closed import AnyEngine, AnyServer, ClosedEngine
from telegrad.worker.scope import clean_state

__all__ = ["ThreadPool"]

logger: logging.Logger = logging.getLogger("telegrad")

# Operations of enums take microseconds. Requests and verifications stay in the core.
ONEWAY, COMPLETION, EVENT = int(WorkKind.ONEWAY), int(WorkKind.COMPLETION), int(WorkKind.EVENT)
EXIT_THREAD, NO_WORK, CANCEL = int(WorkKind.EXIT_THREAD), int(WorkKind.NO_WORK), int(WorkKind.CANCEL)


class ThreadPool:
    """Thread pool of one worker.

    Args:
        engine: Engine that assigns work items to the pool.
        server: Server of the engine's requests.
        name: Prefix of the threads' names.
        handle: Functions by kind of work item. Their exceptions are logged.
    """

    def __init__(
        self,
        engine: AnyEngine,
        server: AnyServer,
        name: str,
        handle: dict[int, Callable[[tuple[Any, ...]], None]],
    ) -> None:
        self._engine = engine
        self._server = server
        self._name = name
        self._handle = handle
        self._lock = threading.Lock()
        self.contexts: dict[threading.Thread, Context] = {}  # of the running threads, for `telegrad.worker.diagnostics`
        self.on_growth: Callable[[], object] = lambda: None  # called when further threads start
        self._count = 0
        self._thread_limit_hit = False  # logged already
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def start(self) -> None:
        """Start one thread; the core requests further threads when needed."""
        with self._lock:
            self._count += 1
            name, me = f"telegrad-{self._name}-{self._count}", _core.PoolThread()
            context = Context()  # as a new thread has, but other threads can read it
            thread = threading.Thread(target=context.run, args=(self._serve, me), name=name, daemon=True)
            self.contexts[thread] = context
            try:
                thread.start()
            except BaseException:
                self.contexts.pop(thread, None)
                raise

    def submit(self, job: Callable[..., None], *arguments: object) -> None:
        """Run a function on a thread of the pool."""
        self._jobs.append((job, arguments))
        self._engine.request_callback(0)

    def run_submitted(self) -> None:
        """Run the submitted functions, on the pool thread that was interrupted for them."""
        while True:
            try:
                job, arguments = self._jobs.popleft()
            except IndexError:
                return
            if self._jobs:
                self._engine.request_callback(0)  # this function may take long: another thread runs the rest
            job(*arguments)

    def _serve(self, me: _core.PoolThread) -> None:
        server, handle = self._server, self._handle
        try:
            while True:
                try:
                    item = server.next(me, self._start_another)
                    if item is None:
                        if process_hooks.forked:
                            process_hooks.leave_child(None)
                        return
                    kind = item[0]
                    if kind == NO_WORK:
                        continue
                    if kind == EXIT_THREAD:
                        return
                    handle[kind](item)
                except BaseException:  # also errors of user code during unpickling
                    log_internal_error("a pool thread of %s failed with an internal error", self._name)
                item = None  # release its objects while this thread waits
                clean_state()  # reset what callbacks and finalizers have set
        finally:
            del server  # a stored traceback may keep this frame
            _core.release()
            with self._lock:
                self.contexts.pop(threading.current_thread(), None)

    def _start_another(self) -> None:
        """Start another thread; if that fails, the core asks again with a later item."""
        try:
            self.start()
            self._thread_limit_hit = False
            self.on_growth()
        except BaseException as e:
            self._engine.spawn_failed()
            if self._thread_limit_hit:
                return
            self._thread_limit_hit = True
            logger.error(
                "worker %s cannot start another thread (%s): requests run on the %d threads it has. Raise the limit on"
                " threads (ulimit -u, or the container's) or lower num_worker_threads.",
                self._name,
                e,
                len(self.contexts),
            )

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread belongs to this pool."""
        return threading.current_thread() in self.contexts

    def threads(self) -> list[threading.Thread]:
        """Return the running threads."""
        with self._lock:
            return list(self.contexts)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all threads except the calling one, after the engine has stopped.

        Args:
            timeout: Limit in seconds; None for no limit.

        Returns:
            False on timeout, because a handler still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                others = [t for t in self.contexts if t is not threading.current_thread()]
            if not others:
                return True
            others[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def replace_engine(self, ended: ClosedEngine) -> None:
        """Replace the engine after closing, and discard submitted functions."""
        self._engine = self._server = ended
        self._jobs = deque(maxlen=0)

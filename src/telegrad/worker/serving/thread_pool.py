"""The threads that run handlers and callbacks. The core decides which of them runs what, when one more is needed."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from telegrad import _core
from telegrad.wire import WorkKind
from telegrad.worker import process_hooks
from telegrad.worker.closed import AnyEngine, AnyServer, ClosedEngine
from telegrad.worker.scope import clean_state

__all__ = ["ThreadPool"]

logger: logging.Logger = logging.getLogger("telegrad")

ONEWAY, COMPLETION, EVENT, EXIT_THREAD, NO_WORK = map(int, list(WorkKind)[1:])


class ThreadPool:
    """The pool of one worker.

    Args:
        engine: whose work it does.
        server: serves the requests of it.
        name: of its threads.
        handle: called with each item of `Engine.next`, by the item's kind. May raise: that is logged.
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
        self._threads: set[threading.Thread] = set()
        self._count = 0
        self._thread_limit_hit = False  # of threads, and it has been said
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def start(self) -> None:
        """Starts the first thread; the others start when they are needed."""
        with self._lock:
            self._count += 1
            name, me = f"telegrad-{self._name}-{self._count}", _core.PoolThread()
            thread = threading.Thread(target=self._serve, args=(me,), name=name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                raise

    def submit(self, job: Callable[..., None], *arguments: Any) -> None:
        """Runs something on a thread of the pool, soon."""
        self._jobs.append((job, arguments))
        self._engine.request_callback(0)

    def run_submitted(self) -> None:
        """Runs what was submitted; by whoever takes the nudge."""
        while True:
            try:
                job, arguments = self._jobs.popleft()
            except IndexError:
                return
            if self._jobs:
                self._engine.request_callback(0)  # this one may take long: let another thread have the rest
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
                except BaseException:  # what user code raises while it is unpickled must not end the thread either
                    logger.exception(
                        "a pool thread of %s met an error that is Telegrad's own; please report it", self._name
                    )
                item = None  # what it holds must not outlive it while this thread waits
                clean_state()  # nor what callbacks and finalizers have switched
        finally:
            del server  # a traceback that somebody keeps keeps this frame
            _core.release()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _start_another(self) -> None:
        """Starts one more thread, if the machine has one; else the core asks again with a later item."""
        try:
            self.start()
            self._thread_limit_hit = False
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
                len(self._threads),
            )

    def owns_current_thread(self) -> bool:
        """Is the calling thread one of these?"""
        return threading.current_thread() in self._threads

    def threads(self) -> list[threading.Thread]:
        """Those that run."""
        with self._lock:
            return list(self._threads)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for all threads but the calling one to end. The engine must have been stopped. False: not in time,
        because a handler still runs."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                others = [t for t in self._threads if t is not threading.current_thread()]
            if not others:
                return True
            others[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def replace_engine(self, ended: ClosedEngine) -> None:
        """Forgets what was submitted and has not been run, and lets go of the engine."""
        self._engine = self._server = ended
        self._jobs = deque(maxlen=0)

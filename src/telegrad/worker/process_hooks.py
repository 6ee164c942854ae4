"""Workers of a process, and how they end when the process exits or forks."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import weakref
from typing import Any, NoReturn

from telegrad.errors import NotInitialized, RRefDeleted
from telegrad.group.unix_store import close_servers
from telegrad.worker.unread_failures import discard_unread, log_unread

__all__ = ["leave_child", "live_workers", "register", "unregister"]

# By id. No WeakSet: a thread cannot iterate over that while workers of other threads join or close.
_live: dict[int, weakref.ref[Any]] = {}
_exits: set[int] = set()
_GRACE = 0.2  # s for daemon threads to end after their calls failed at interpreter exit
_STORE_GRACE = 2.0  # s for the threads that serve the group's store to end an operation


def register(worker: object) -> None:
    """Register a worker to be closed at process exit, unless the program closes it."""
    key = id(worker)
    _live[key] = weakref.ref(worker, lambda _, remove=_live.pop: remove(key, None))  # type: ignore[misc]
    NotInitialized.inherited = ""
    if os.getpid() not in _exits and _is_forked_by_multiprocessing():
        _exits.add(os.getpid())
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)


def unregister(worker: object) -> None:
    """Remove a worker that has closed."""
    _live.pop(id(worker), None)


def live_workers() -> list[Any]:
    """Return the workers of this process that have not closed.

    Any thread may call this.
    """
    found = [worker() for worker in list(_live.values())]
    return [worker for worker in found if worker is not None]


# ---- exit: a worker without a shutdown sends GOODBYE and ends its threads before the interpreter exits


def close_all() -> None:
    """Close every worker of this process; after Ctrl+C, do not wait for handlers."""
    interrupted = isinstance(
        getattr(sys, "last_value", None), KeyboardInterrupt
    )  # the exception that ended the program
    for worker in live_workers():
        with contextlib.suppress(KeyboardInterrupt):
            worker.close(interrupted)


def _close_at_exit() -> None:
    """Close every worker at interpreter exit, and wait for failed threads.

    Only daemon threads are left at that time. A daemon thread that still runs torch code when the interpreter exits
    crashes the process.
    """
    waited = any(worker.busy for worker in live_workers())
    _silence_stopped_threads()
    close_all()
    until = time.monotonic() + (_GRACE if waited else 0.0)
    for thread in threading.enumerate() if waited else ():
        if thread.daemon and not isinstance(thread, threading._DummyThread):
            with contextlib.suppress(KeyboardInterrupt):
                thread.join(max(0.0, until - time.monotonic()))
    with contextlib.suppress(KeyboardInterrupt):
        close_servers(_STORE_GRACE)
    log_unread()


def _silence_stopped_threads() -> None:
    """Print nothing for daemon threads that end with their closed worker."""
    report = threading.excepthook

    def report_others(failed: threading.ExceptHookArgs) -> None:
        is_stopped = isinstance(failed.exc_value, NotInitialized | RRefDeleted)
        if not (is_stopped and failed.thread is not None and failed.thread.daemon):
            report(failed)

    threading.excepthook = report_others


# Handlers run in reverse order, so handlers that the program registers later can still use the worker.
atexit.register(_close_at_exit)


def _is_forked_by_multiprocessing() -> bool:
    """Return whether this process runs multiprocessing finalizers, not `atexit`.

    Before Python 3.13 such a child runs no `atexit` handlers; since 3.13 it starts without any, and runs the finalizers
    after its own. A spawned child runs both, but before 3.13 it runs the finalizers first, which is too early for a
    worker.
    """
    if multiprocessing.parent_process() is None:
        return False
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    return method in ("fork", "forkserver")


# ---- fork: the child lacks the threads, so it has no worker; the core closes the inherited links


_INHERITED = (
    "This process (pid {}) was forked from that of {} (pid {}), and a fork has no worker. Make the call in the parent,"
    " start the process with the method spawn, or join under another name: call telegrad.rpc.init_rpc in the child."
)
_detached: list[object] = []
forked: bool = False  # this process is the child of a handler and exits with that handler


def _after_fork_in_child() -> None:
    global forked
    workers = live_workers()
    if names := sorted(worker.info.name for worker in workers if not worker.closed):
        of_all = f"worker{'s' * (len(names) > 1)} {', '.join(names)}"
        NotInitialized.inherited = _INHERITED.format(os.getpid(), of_all, os.getppid())
    for worker in workers:
        forked = forked or worker.owns_current_thread()
        _detached.append(
            (worker, worker.detach_after_fork())
        )  # never freed: their locks and threads belong to the parent
    _live.clear()
    discard_unread()


def leave_child(error: BaseException | None) -> NoReturn:
    """Exit a child that a handler or a callback forked, when that function ends.

    The code that follows belongs to the parent.

    Args:
        error: The exception that the function raised.
    """
    code: Any = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            stream.flush()
    os._exit(code & 0xFF)


os.register_at_fork(after_in_child=_after_fork_in_child)

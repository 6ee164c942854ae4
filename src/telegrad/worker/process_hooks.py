"""The workers of a process, and what becomes of them when the process ends or forks."""

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

from telegrad.worker.unread_failures import discard_unread, log_unread

__all__ = ["leave_child", "live_workers", "register"]

live_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_exits: set[int] = set()
_GRACE = 0.2  # s that daemon threads may take to end, once their calls have failed because the interpreter ends


def register(worker: Any) -> None:
    """Closes the worker when its process ends, unless the program has closed it before."""
    live_workers.add(worker)
    if os.getpid() not in _exits and _is_forked_by_multiprocessing():
        _exits.add(os.getpid())
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)


# ---- exit: a worker without a shutdown says goodbye, and ends its threads before the interpreter ends.


def close_all() -> None:
    """Closes every worker of this process. An interrupt (Ctrl+C) only ends the waiting for handlers."""
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)  # what the program has ended with
    for worker in list(live_workers):
        with contextlib.suppress(KeyboardInterrupt):
            worker.close(interrupted)


def _end() -> None:
    """At the end of the interpreter: closes every worker, and lets threads end that waited for something of it.

    Only daemon threads are left by then. Those that go on in torch when the interpreter ends bring down the process.
    """
    waited = any(worker.busy for worker in live_workers)
    close_all()
    until = time.monotonic() + (_GRACE if waited else 0.0)
    for thread in threading.enumerate() if waited else ():
        if thread.daemon and not isinstance(thread, threading._DummyThread):
            with contextlib.suppress(KeyboardInterrupt):
                thread.join(max(0.0, until - time.monotonic()))
    log_unread()


# Handlers run in reverse order, so those that the program registers later still find its worker.
atexit.register(_end)


def _is_forked_by_multiprocessing() -> bool:
    """Whether this process runs multiprocessing's finalizers at its end, but not the `atexit` handler above.

    Before Python 3.13 such a child runs no handlers at all; since then it begins with none, and runs the finalizers
    after its own. A spawned child runs both, but before 3.13 the finalizers first: too early for a worker.
    """
    if multiprocessing.parent_process() is None:
        return False
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    return method in ("fork", "forkserver")


# ---- fork: the child has none of the threads, so it has no worker. (The core closes what it inherits of the links.)


_abandoned: list[Any] = []
forked: bool = False  # this process is a child of a handler: it ends with that


def _after_fork_in_child() -> None:
    global forked
    for worker in list(live_workers):
        forked = forked or worker.runs_here()
        _abandoned.append((worker, worker.abandon()))  # never freed: their locks and threads are the parent's
    live_workers.clear()
    discard_unread()


def leave_child(error: BaseException | None) -> NoReturn:
    """Ends a child that a handler or a callback has forked, where that returns or raises: what comes next is the
    parent's.

    Args:
        error: what it has raised.
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

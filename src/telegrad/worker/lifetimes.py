"""The workers of a process, and what becomes of them when the process ends or forks."""

import atexit
import multiprocessing.util
import os
import weakref
from typing import Any

__all__ = ["live_workers", "remember"]

live_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_exits: set[int] = set()


def remember(worker: Any) -> None:
    """From now on the worker is closed when its process ends, unless it has been before."""
    live_workers.add(worker)
    if os.getpid() not in _exits:  # the first one: children of multiprocessing do not run atexit, but this
        _exits.add(os.getpid())
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)


# ---- exit: whoever ends without a shutdown says goodbye, and ends its threads before the interpreter does.


def close_all() -> None:
    """Closes every worker of this process."""
    for worker in list(live_workers):
        worker.close()


atexit.register(close_all)


# ---- fork: the child has none of the threads, so it has no worker. (The core closes what it inherits of the links.)


_abandoned: list[Any] = []


def _after_fork_in_child() -> None:
    for worker in list(live_workers):
        _abandoned.append((worker, worker.abandon()))  # never freed: their locks and threads are the parent's
    live_workers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

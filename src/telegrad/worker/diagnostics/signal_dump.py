"""Dump of all workers of the process on SIGUSR2.

The snapshots of the workers go to the log, the stacks of all threads to stderr.
The stacks are written by `faulthandler` within the signal handler of C, so they come out even if a thread holds the GIL
and never releases it. The snapshots follow as soon as the main thread runs Python code.
"""

import _thread
import faulthandler
import logging
import signal
import threading
from types import FrameType

from telegrad.worker import process_hooks
from telegrad.worker.diagnostics.snapshot import snapshot

__all__ = ["install", "log_snapshots"]

logger: logging.Logger = logging.getLogger("telegrad")

_STDERR = 2  # file descriptor; `sys.stderr` may be replaced, or have none
_SIGNAL = signal.SIGUSR2

_writes_stacks = False
_logs_snapshots = False


def install() -> None:
    """Install the handler of SIGUSR2, once per process, for as long as it lives.

    Without a handler, the signal would end the process: so it also stays after the last worker has closed. A handler
    that the program has installed before is still called. Outside of the main thread, Python installs no handlers:
    then the signal writes the stacks only, until a worker joins in the main thread.
    """
    global _writes_stacks, _logs_snapshots
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _logs_snapshots or (_writes_stacks and not in_main_thread):
        return
    previous = signal.getsignal(_SIGNAL)
    if in_main_thread:

        def on_signal(number: int, frame: FrameType | None) -> None:
            # This thread may hold the lock of `threading` or of logging, which only another thread can wait for.
            _thread.start_new_thread(log_snapshots, ())
            if callable(previous):
                previous(number, frame)

        faulthandler.unregister(_SIGNAL)  # if a worker has registered it before: it has to be the outer handler
        signal.signal(_SIGNAL, on_signal)
        _logs_snapshots = True
    else:
        logger.warning(
            "option dump_on_sigusr2: the worker joins outside of the main thread, so SIGUSR2 writes stacks but no"
            " snapshots. Create a worker in the main thread for both."
        )
    _writes_stacks = True
    # Without a handler of Python, the next one in the chain would end the process.
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True, chain=in_main_thread or callable(previous))


def log_snapshots() -> None:
    """Log a snapshot of each worker of the process."""
    workers = process_hooks.live_workers()
    if not workers:
        logger.warning("SIGUSR2: this process has no worker")
    for worker in workers:
        try:
            logger.warning("SIGUSR2: %s", snapshot(worker))
        except Exception:  # the worker closes at the same time
            logger.warning("SIGUSR2: no snapshot of worker %s", worker.info.name, exc_info=True)

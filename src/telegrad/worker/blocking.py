"""Check that no thread of an event loop blocks."""

import threading

from telegrad.errors import TelegradError

__all__ = ["check_blocking", "this_thread"]

this_thread: threading.local = threading.local()  # .worker: name of the worker, in the threads of event loops


def check_blocking(
    operation: str = "rpc_sync or to_here()", instead: str = "`await rpc_async(...)`, or await the RRef"
) -> None:
    """Raise if a blocking operation is called in the thread of an event loop.

    Args:
        operation: Name of the operation, for the error.
        instead: What coroutines use instead.

    Raises:
        TelegradError: The calling thread runs the coroutines of a worker.
    """
    worker: str | None = getattr(this_thread, "worker", None)
    if worker is not None:
        raise TelegradError(f"{operation} would block the event loop of worker {worker!r}; use {instead}")

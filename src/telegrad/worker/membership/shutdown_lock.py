"""Lock of a worker's graceful shutdown, which runs once at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from telegrad.errors import ShutdownTimeout, TelegradError

__all__ = ["ShutdownLock"]


class ShutdownLock:
    """Lock that is held during a graceful shutdown.

    Args:
        leave: Makes the worker leave at once.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._lock = threading.Lock()
        self._holder = 0  # thread

    def locked(self) -> bool:
        """Return whether a graceful shutdown runs."""
        return self._lock.locked()

    @contextmanager
    def held(self, limit: float) -> Iterator[None]:
        """Hold the lock in the block.

        Args:
            limit: Limit in seconds of the wait for another shutdown; 0 for none.

        Raises:
            TelegradError: A signal handler has interrupted the other one, which cannot end before the handler.
            ShutdownTimeout: The other one has not ended in time. The worker has left at once.
        """
        if self._holder == threading.get_ident():
            raise TelegradError(
                "shutdown() was called while the same thread shuts down, as by a signal handler: it would wait for"
                " itself. Leave at once with shutdown(graceful=False)."
            )
        if not self._lock.acquire(timeout=min(limit or threading.TIMEOUT_MAX, threading.TIMEOUT_MAX)):
            self._leave()
            raise ShutdownTimeout(limit)
        try:
            self._holder = threading.get_ident()
            yield
        finally:
            self._holder = 0
            self._lock.release()

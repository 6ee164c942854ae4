"""Delayed functions of a worker, on a thread of their own that runs no user code."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from telegrad.internal_errors import log_internal_error

__all__ = ["Timers"]


class Timers:
    """Timers of one worker. Their thread starts with the first timer.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call_later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run a function, which must not block, after a delay; never after `stop`."""
        with self._changed:
            if self._stopped:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()  # may fail; then the next timer tries again
                self._thread = thread
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), function))
            self._changed.notify()

    def owns_current_thread(self) -> bool:
        """Return whether the calling thread is the thread of the timers."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> bool:
        """Discard pending timers and end the thread; False if that takes too long.

        Args:
            timeout: Limit in seconds.
        """
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._stopped:
                    left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(left if left is None else min(left, threading.TIMEOUT_MAX))
                if self._stopped:
                    return
                function = heapq.heappop(self._waiting)[2]
            try:
                function()
            except BaseException:  # the thread continues
                log_internal_error("internal error in a timer of %s", self._name)
            del function  # release its objects while this thread waits

"""What a worker does after a while: on a thread of its own, which runs no user code."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timers"]

logger: logging.Logger = logging.getLogger("telegrad")


class Timers:
    """The timers of one worker, and their thread, which starts with the first of them.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs a function, which must not block, after a while; never, if the timers have been stopped by then."""
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def is_here(self) -> bool:
        """Is the calling thread that of the timers?"""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> bool:
        """Drops what waits and ends the thread. False: not in `timeout` seconds."""
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
                    self._changed.wait(left)
                if self._stopped:
                    return
                function = heapq.heappop(self._waiting)[2]
            try:
                function()
            except BaseException:  # of a logging handler of the program's, say: the thread goes on
                logger.exception("a timer of %s met an error that is Telegrad's own; please report it", self._name)
            del function  # what it holds must not outlive it while this thread waits

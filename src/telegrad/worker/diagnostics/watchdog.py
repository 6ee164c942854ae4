"""Watchdog: a warning for each handler that runs for long, with its stack."""

import logging

from telegrad.worker.calls.pending_work import Delay
from telegrad.worker.diagnostics.running import RunningHandlers, RunningRequest

__all__ = ["Watchdog"]

logger: logging.Logger = logging.getLogger("telegrad")

_CHECKS_PER_TIMEOUT = 4  # a handler is reported after at most 1.25 times the timeout
_LONGEST_INTERVAL = 5.0  # s


class Watchdog:
    """Watchdog of the handlers of one worker.

    It reads the requests that run from time to time, so a request leaves no record for it.

    Args:
        name: Name of the worker.
        timeout: Seconds after which a handler is reported, once; 0 for never.
        running: The running requests.
        later: Runs a function after some seconds, on a thread that handlers cannot block.
    """

    def __init__(self, name: str, timeout: float, running: RunningHandlers, later: Delay) -> None:
        self._name = name
        self._timeout = timeout
        self._interval = min(timeout / _CHECKS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._running = running
        self._later = later
        self._has_started = False
        self._reported: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Check periodically from now on; a further call does nothing."""
        if self._has_started or not self._timeout:
            return
        self._has_started = True
        try:
            self._later(self._interval, self._tick)
        except RuntimeError:  # the process has too many threads: the next call tries again
            self._has_started = False

    def _tick(self) -> None:
        try:
            self.check()
        finally:
            self._later(self._interval, self._tick)

    def check(self) -> None:
        """Report the handlers that have exceeded the timeout since the last check."""
        requests = self._running.snapshot()
        late = {request.key: request for request in requests if request.age >= self._timeout}
        new = [request for key, request in late.items() if key not in self._reported]
        self._reported = set(late)
        for request in new:
            self._report(request)

    def _report(self, request: RunningRequest) -> None:
        stack = request.format_stack()
        logger.warning(
            "worker %s: %s, called by %s, has %s for %s s on thread %s, longer than stuck_handler_timeout."
            " Raise that option if the function may take this long.%s",
            self._name,
            request.function,
            request.caller,
            "waited as a coroutine" if request.waits else "run",
            format(request.age, ".0f" if request.age >= 10 else ".2g"),
            request.thread,
            f" It is at:\n{stack}" if stack else "",
        )

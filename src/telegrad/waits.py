"""Waits for other workers, with their timeouts, log lines and periodic checks."""

import logging
import math
import threading
import time
from collections.abc import Callable

__all__ = ["FIRST_LOG", "LOG_INTERVAL", "SIGNAL_CHECK_INTERVAL", "Wait", "wait_for"]

logger: logging.Logger = logging.getLogger("telegrad")

FIRST_LOG, LOG_INTERVAL = 5.0, 30.0  # s until the first log line of a wait, and between further ones
SIGNAL_CHECK_INTERVAL = 1.0  # s between two checks for signals during a wait


class Wait:
    """Wait for other workers, which the log announces after 5 s and then every 30 s.

    Args:
        waiter: The waiting worker: name and rank.
        timeout: Limit in seconds.
        check: Called periodically during the wait; an exception ends the wait.
        every: Seconds between two checks.
    """

    def __init__(
        self, waiter: str, timeout: float, check: Callable[[], None] | None = None, every: float = 0.5
    ) -> None:
        self.waiter = waiter
        self.timeout = timeout
        self._check = check
        self._every = every
        self._begun = time.monotonic()
        self._until = self._begun + timeout
        self._next_check = self._begun + every
        self._next_line = self._begun + FIRST_LOG

    @property
    def left(self) -> float:
        """Seconds until the timeout; 0 after it."""
        return max(self._until - time.monotonic(), 0.0)

    def pause(self) -> float:
        """Return the seconds until the next step, more than 0."""
        now = time.monotonic()
        ends = [self._until, self._next_line]
        if self._check is not None:
            ends.append(self._next_check)
        return max(min(ends) - now, 0.001)

    def step(self, for_what: Callable[[], tuple[str, str]]) -> None:
        """Run the check and write the log line that are due between two pauses.

        Args:
            for_what: Returns the awaited workers and their place, and the last failure or "". Called for log lines
                only.
        """
        now = time.monotonic()
        if self._check is not None and now >= self._next_check:
            self._next_check = now + self._every
            self._check()
        if now < self._next_line:
            return
        self._next_line = now + LOG_INTERVAL
        others, last = for_what()
        logger.warning(
            "%s is waiting for %s since %.3g s%s",
            self.waiter,
            others,
            now - self._begun,
            f"; last: {last}" if last else "",
        )


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event in slices, so that signal handlers run in time.

    Python's own wait can miss a signal that the kernel delivers to another thread, or that arrives just before the
    wait: handlers run in the main thread, after the wait.

    Args:
        event: The event.
        timeout: Limit in seconds; None for no limit.

    Returns:
        False on timeout.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    while not event.wait(max(min(until - time.monotonic(), SIGNAL_CHECK_INTERVAL), 0.0)):
        if time.monotonic() >= until:
            return False
    return True

"""Waits for other workers: how long one may take, what the log tells of it, and what has to be done meanwhile."""

import logging
import math
import threading
import time
from collections.abc import Callable

__all__ = ["FIRST_LOG", "LOG_INTERVAL", "SIGNAL_CHECK_INTERVAL", "Wait", "wait_for"]

logger: logging.Logger = logging.getLogger("telegrad")

FIRST_LOG, LOG_INTERVAL = 5.0, 30.0  # s until the log tells of a wait, and until it does so again
SIGNAL_CHECK_INTERVAL = 1.0  # s of a wait that signals may end, between two looks for them


class Wait:
    """One wait for other workers. After 5 s, and then every 30 s, the log tells of it.

    Args:
        who: waits: name and rank.
        timeout: seconds.
        check: called again and again while the wait lasts; what it raises ends the wait.
        every: seconds between two looks.
    """

    def __init__(self, who: str, timeout: float, check: Callable[[], None] | None = None, every: float = 0.5) -> None:
        self.who = who
        self.timeout = timeout
        self._check = check
        self._every = every
        self._begun = time.monotonic()
        self._until = self._begun + timeout
        self._next_check = self._begun + every
        self._next_line = self._begun + FIRST_LOG

    @property
    def left(self) -> float:
        """Seconds until the time is up; 0 if it is."""
        return max(self._until - time.monotonic(), 0.0)

    def pause(self) -> float:
        """Seconds until there is something to do besides waiting; more than 0."""
        now = time.monotonic()
        ends = [self._until, self._next_line]
        if self._check is not None:
            ends.append(self._next_check)
        return max(min(ends) - now, 0.001)

    def step(self, for_what: Callable[[], tuple[str, str]]) -> None:
        """Does what there is to do between two pauses.

        Args:
            for_what: asked when the log is to tell: who is waited for, and where; and what the last attempt met, or "".
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
            self.who,
            others,
            now - self._begun,
            f"; last: {last}" if last else "",
        )


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event, until a signal handler raises at most, as that of Ctrl+C does.

    Python's own wait overlooks a signal that the kernel gives to another thread, or that comes just before the wait:
    handlers run in the main thread, after the wait.

    Args:
        timeout: in seconds; None is no limit.

    Returns:
        False if the event has not come when the time is up.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    while not event.wait(max(min(until - time.monotonic(), SIGNAL_CHECK_INTERVAL), 0.0)):
        if time.monotonic() >= until:
            return False
    return True

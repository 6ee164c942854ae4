"""Timeouts: their form in the API and inside, and one that several steps share."""

import math
import time
from typing import Any

__all__ = ["FOREVER", "SharedDeadline", "nanoseconds"]

FOREVER = 1e9  # s; longer timeouts, infinity too, are none
_MIN_STEP = 1.0  # s


def nanoseconds(seconds: Any) -> int:
    """A timeout in ns: 0 for none, at least 1 for one that is over before it begins.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    if not isinstance(seconds, (int, float)):
        seconds = _number(seconds)
    if seconds < FOREVER:
        return max(int(seconds * 1e9), 1) if seconds else 0
    if math.isnan(seconds):
        raise ValueError(f"a timeout has to be a number of seconds, not {seconds}")
    return 0


def _number(seconds: Any) -> float:
    try:
        return float(seconds.__float__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"timeout has to be a number of seconds (0 for no limit, -1 for the default), not {seconds!r}"
        ) from None


class SharedDeadline:
    """A timeout for several steps together.

    A step that begins late has a second at least, so that what needs no waiting is done all the same; but all of them
    together take no more than that second beyond the limit.

    Args:
        seconds: the limit; 0 is none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """The timeout of the next step: seconds, more than 0; or 0 if there is no limit."""
        if not self._seconds:
            return 0.0
        left = self._deadline - time.monotonic()
        return max(left, min(_MIN_STEP, left + _MIN_STEP), 0.001)

"""Timeouts: conversion from the API's form, and a deadline for several steps."""

import math
import time
from typing import Any

from telegrad.errors import is_drop_in

__all__ = ["FOREVER", "SharedDeadline", "WaitLimit", "nanoseconds"]

FOREVER = 1e9  # s; longer timeouts, and infinity, mean no timeout
_MIN_STEP = 1.0  # s that every step may take


def nanoseconds(seconds: Any) -> int:
    """Convert a timeout to ns: 0 for none, else at least 1.

    Raises:
        TypeError, ValueError: The timeout is not a number, or negative. Under the drop-in a negative timeout has
            expired, as in torch.
    """
    if not isinstance(seconds, (int, float)):
        seconds = _number(seconds)
    if 0 < seconds < FOREVER:
        return int(seconds * 1e9) or 1
    if math.isnan(seconds):
        raise ValueError(f"a timeout has to be a number of seconds, not {seconds}")
    if seconds < 0 and not is_drop_in():
        raise ValueError(
            f"a timeout has to be a number of seconds, 0 or more, not {seconds} (0 for no limit, -1 for the default)"
        )
    return 1 if seconds < 0 else 0


def _number(seconds: Any) -> float:
    try:
        return float(seconds.__float__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"timeout has to be a number of seconds (0 for no limit, -1 for the default), not {seconds!r}"
        ) from None


class WaitLimit:
    """Limit of a wait in seconds; None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds: float = seconds or 0.0
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left, None for no limit."""
        return None if self._until == math.inf else max(self._until - time.monotonic(), 0.0)


class SharedDeadline:
    """Deadline of several steps together.

    Each step gets at least a second, so that steps without a wait still run. Together, the steps exceed the limit by at
    most that second.

    Args:
        seconds: Limit in seconds; 0 for none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Return the timeout of the next step in seconds, more than 0; 0 for no limit."""
        if not self._seconds:
            return 0.0
        left = self._deadline - time.monotonic()
        return max(left, min(_MIN_STEP, left + _MIN_STEP), 0.001)

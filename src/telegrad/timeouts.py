"""Timeouts: conversion from the API's form, and a deadline for several steps."""

import math
import time
from typing import Any

__all__ = ["FOREVER", "SharedDeadline", "nanoseconds"]

FOREVER = 1e9  # s; longer timeouts, and infinity, mean no timeout
_MIN_STEP = 1.0  # s that every step may take


def nanoseconds(seconds: Any) -> int:
    """Convert a timeout to ns: 0 for none, at least 1 for one that has expired.

    Raises:
        TypeError, ValueError: The timeout is not a number.
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

"""Time-outs as the API takes them, and as they are kept."""

import math
from typing import Any

__all__ = ["FOREVER", "nanoseconds"]

FOREVER = 1e9  # s; longer time-outs, infinity too, are none


def nanoseconds(seconds: Any) -> int:
    """A time-out in ns: 0 for none, at least 1 for one that is over before it begins.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    if not isinstance(seconds, (int, float)):
        seconds = _number(seconds)
    if seconds < FOREVER:
        return max(int(seconds * 1e9), 1) if seconds else 0
    if math.isnan(seconds):
        raise ValueError(f"a time-out has to be a number of seconds, not {seconds}")
    return 0


def _number(seconds: Any) -> float:
    try:
        return float(seconds.__float__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"timeout has to be a number of seconds (0 for no limit, -1 for the default), not {seconds!r}"
        ) from None

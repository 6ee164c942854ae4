"""Time-outs as the API takes them, and as they are kept."""

import math

__all__ = ["FOREVER", "nanoseconds"]

FOREVER = 1e9  # s; longer time-outs, infinity too, are none


def nanoseconds(seconds: float) -> int:
    """A time-out in ns: 0 for none, at least 1 for one that is over before it begins.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    if seconds < FOREVER:
        return max(int(seconds * 1e9), 1) if seconds else 0
    if math.isnan(seconds):
        raise ValueError(f"a time-out has to be a number of seconds, not {seconds}")
    return 0

"""Time that the steps of one undertaking share."""

import time

__all__ = ["Budget"]

_MORE = 1.0  # s


class Budget:
    """A time-out for several steps together.

    A step that begins late has a second at least, so that what needs no waiting is done all the same; but all of them
    together take no more than that second beyond the limit.

    Args:
        seconds: the limit; 0 is none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """The time-out of the next step: seconds, more than 0; or 0 if there is no limit."""
        if not self._seconds:
            return 0.0
        left = self._deadline - time.monotonic()
        return max(left, min(_MORE, left + _MORE), 0.001)

"""Settled runs of a caller, for which it never asks again.

The caller numbers its runs in ascending order, and each request for a run lists the oldest runs that are open at the
caller. So a run is settled if its number is smaller than the last one of the list, but not in the list. What is settled
stays settled: lists may arrive in any order, and may be lost. The scheme is that of RIFL (Lee et al., "Implementing
Linearizability at Large Scale and Low Latency", SOSP 2015), with a short list instead of its single number, so that one
long call does not hold back the results of all later ones.
"""

from collections.abc import Sequence
from typing import Final

__all__ = ["MOST_LISTED", "Settled"]

MOST_LISTED: Final = 16
"""Most open runs in the list of a request."""


class Settled:
    """Set of the settled runs of one caller.

    Its size does not depend on how many there are.

    Example::

        settled = Settled()
        settled.add((3, 7))
        assert 2 in settled and 5 in settled
        assert 3 not in settled and 7 not in settled and 8 not in settled
    """

    __slots__ = ("_open", "bound")

    def __init__(self) -> None:
        self.bound: int = 0  # no run with this number or a larger one is settled
        self._open: frozenset[int] = frozenset()  # smaller numbers of runs that are not settled

    def __contains__(self, number: int) -> bool:
        return number < self.bound and number not in self._open

    def add(self, open_runs: Sequence[int]) -> None:
        """Add the runs that a list settles.

        Args:
            open_runs: Ascending numbers of the oldest open runs; at least one.
        """
        bound, listed = open_runs[-1], frozenset(open_runs)
        self._open = frozenset(
            number for number in self._open | listed if number not in self and (number >= bound or number in listed)
        )
        self.bound = max(self.bound, bound)

    def add_up_to(self, number: int) -> None:
        """Add all runs up to a number, since their results are gone."""
        self._open = frozenset(each for each in self._open if each > number)
        self.bound = max(self.bound, number + 1)

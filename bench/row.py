"""Types of the bench: a row, its samples and its goals.

Every figure is a cost (seconds, bytes, a share of a core), so lower is always better.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

OURS: Final = "telegrad"
TORCH: Final = "torch"
BASELINE: Final = "baseline"  # its key in results, like the name of a competitor
BASELINE_WITH: Final = (
    "baseline alongside "  # followed by a competitor's name: the baseline measured alternately with that competitor
)

T = TypeVar("T")
Samples = Mapping[str, Sequence[float]]
"""Samples of a turn by origin: `{"": samples of the competitor}`, and those of the baseline if the two alternate."""


class Goal(Protocol):
    """Goal of a row."""

    @property
    def text(self) -> str: ...

    def reached(self, medians: Mapping[str, float]) -> tuple[float, bool] | None:
        """Return the value and whether the goal is reached; None if not measured."""


@dataclass(frozen=True)
class FasterThan:
    """Telegrad's cost is at most 1 / `factor` of a competitor's."""

    factor: float
    than: str = TORCH

    @property
    def text(self) -> str:
        return f"{self.factor:g} x faster than {self.than}"

    def reached(self, medians: Mapping[str, float]) -> tuple[float, bool] | None:
        if OURS not in medians or self.than not in medians:
            return None
        value = medians[self.than] / max(medians[OURS], 1e-12)
        return value, value >= self.factor


@dataclass(frozen=True)
class WithinBaseline:
    """Our cost is at most `factor` times the baseline's."""

    factor: float

    @property
    def text(self) -> str:
        return f"at most {self.factor:.3g} x the baseline"

    def reached(self, medians: Mapping[str, float]) -> tuple[float, bool] | None:
        if OURS not in medians or BASELINE not in medians:
            return None
        value = medians[OURS] / max(medians[BASELINE], 1e-12)
        return value, value <= self.factor


@dataclass(frozen=True)
class LessOverhead:
    """Telegrad's overhead over the baseline is at most 1 / `factor` of torch's."""

    factor: float

    @property
    def text(self) -> str:
        return f"adds {self.factor:g} x less than {TORCH}"

    def reached(self, medians: Mapping[str, float]) -> tuple[float, bool] | None:
        if not {OURS, TORCH, BASELINE} <= set(medians):
            return None
        ours = medians[OURS] - medians[BASELINE]
        theirs = medians[TORCH] - medians.get(BASELINE_WITH + TORCH, medians[BASELINE])
        if theirs <= 0:  # the machine was too busy to show the overhead
            return None
        value = theirs / max(ours, 1e-9)
        return value, value >= self.factor


@dataclass(frozen=True)
class AtMost:
    """Our cost is at most `most`, in the unit of the row."""

    most: float
    label: str

    @property
    def text(self) -> str:
        return f"at most {self.label}"

    def reached(self, medians: Mapping[str, float]) -> tuple[float, bool] | None:
        if OURS not in medians:
            return None
        return medians[OURS], medians[OURS] <= self.most


class Sampler:
    """Sampler of one row in one turn: warms up, then repeats as configured by the row."""

    def __init__(self, seconds: float, repeats: int, least: int, warm_up: float) -> None:
        self.seconds, self.repeats, self.least, self.warm_up = seconds, repeats, least, warm_up

    def loop(self, step: Callable[[], T]) -> list[T]:
        """Return the results of `step`, without those of the warm-up."""
        if self.warm_up > 0:
            end = time.perf_counter() + self.warm_up
            step()
            while time.perf_counter() < end:
                step()
        found: list[T] = []
        end = time.perf_counter() + self.seconds
        while len(found) < self.least or (len(found) < self.repeats and time.perf_counter() < end):
            found.append(step())
        return found

    def __call__(self, call: Callable[[], object]) -> Samples:
        """Return the seconds of each `call`, including the freeing of its result."""
        return {"": self.loop(lambda: timed(call))}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Row:
    """Row of the table.

    `measure(client, sampler)` runs in worker 0 of a group of `workers` processes that the competitor connects. If
    `workers` is 0, `measure(competitor, sampler)` runs in a separate process and starts all processes that it needs.
    """

    name: str
    measure: Callable[[Any, Sampler], Samples]
    workers: int = 2
    fresh: bool = False  # has a group of its own, so that no row before it has used its memory
    unit: str = "s"  # one of those that figures.show knows
    amount: float = 0  # calls or bytes per sample
    of: str = ""  # "calls" or "bytes", if the table shows a rate too
    goals: tuple[Goal, ...] = ()
    seconds: float = 0.3  # for each turn, after the warm-up, at most
    repeats: int = 2000  # in each turn, at most
    least: int = 2  # in each turn
    resolution: float = 0.0  # how exact a sample is, in the unit
    warm_up: float = 0.1  # seconds, at least one repeat; 0: none
    rounds: int | None = None  # fewer than the run has
    only: Mapping[str, str] | None = None  # None: every competitor. Else its competitors, and under "" the reason
    baseline: Callable[[Sampler], Sequence[float]] | None = None  # measured in turns of its own
    quick: bool = True  # part of --quick
    verdict: bool = True  # False: the figures are shown, and a competitor that is ahead fails nothing
    timeout: float = 60.0  # seconds after which a turn of it counts as hung

    def sampler(self, quick: bool, full: bool) -> Sampler:
        if quick:
            return Sampler(self.seconds / 4, min(self.repeats, 3), min(self.least, 2), min(self.warm_up, 1e-9))
        if full:
            return Sampler(4 * self.seconds, self.repeats, max(self.least, min(self.repeats, 10)), self.warm_up)
        return Sampler(self.seconds, self.repeats, self.least, self.warm_up)

    def unsupported_reason(self, competitor: str) -> str | None:
        """Return why a competitor cannot be measured in this row; None if it can."""
        if self.only is None or competitor in self.only:
            return None
        return self.only[""]


@dataclass(frozen=True)
class Family:
    """Rows that belong together: a part of the table, a picture, a name for `--only`."""

    name: str
    about: str
    rows: tuple[Row, ...]

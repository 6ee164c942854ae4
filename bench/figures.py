"""Computation of figures from samples, described by README.md and the table."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOW = (
    "Median: the median of the rounds' medians. ±: the spread, half the distance between the lowest and the highest of"
    " the rounds' medians, in percent of the median (of one round alone: half the distance between its quartiles);"
    " where samples are less exact, how exact they are. p99: the smallest sample of all rounds that 99 % of them do not"
    " exceed; of fewer than 100, the largest."
)


@dataclass(frozen=True)
class Figure:
    """Cost of one competitor in one row."""

    median: float
    spread: float
    p99: float
    samples: int
    rounds: tuple[float, ...]  # the median of each

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"rounds": list(self.rounds)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Figure":
        return cls(**data | {"rounds": tuple(data["rounds"])})


def figure(rounds: Sequence[Sequence[float]], resolution: float = 0.0) -> Figure:
    """Return the figure of samples in rounds, none of them empty.

    `resolution` is the precision of each sample.
    """
    medians = tuple(statistics.median(samples) for samples in rounds)
    pooled = [sample for samples in rounds for sample in samples]
    spread = (max(medians) - min(medians)) / 2 if len(medians) > 1 else half_of_middle(pooled)
    return Figure(statistics.median(medians), max(spread, resolution), p99(pooled), len(pooled), medians)


def half_of_middle(samples: Sequence[float]) -> float:
    """Return half the distance between the quartiles; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2


def p99(samples: Sequence[float]) -> float:
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def show(value: float, unit: str) -> str:
    """Return a cost in a readable unit."""
    if unit == "MB":
        return f"{value:,.0f} MB"
    if unit == "CPU s":
        return f"{value:.3f} CPU s" if value < 10 else f"{value:.1f} CPU s"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.2f} us" if abs(value) < 1e-5 else f"{value * 1e6:.1f} us"
    return f"{value * 1e3:,.2f} ms" if abs(value) < 1 else f"{value:,.2f} s"


def show_spread(one: Figure, unit: str) -> str:
    """Return a spread in percent or, if it is a multiple of the figure, as a cost."""
    return f"±{one.spread / one.median:.0%}" if one.spread < 10 * one.median else f"±{show(one.spread, unit)}"


def show_rate(cost: float, amount: float, of: str) -> str:
    """Return the rate per second of a cost in seconds for an amount."""
    rate = amount / cost
    if of == "bytes":
        return f"{rate / 1e9:.2f} GB/s"
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate:,.0f}/s"

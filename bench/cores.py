"""Distance between the cores of this machine, which changes on a virtual machine.

The cores of a virtual machine are threads of the host, and the host moves them. Two of them may share one physical
core, be neighbors, or be in parts of the processor without a common cache. In the last case transfers between processes
take up to ten times as long, with every framework: 4 MB take 2 ms instead of 0.25 ms. Inside the machine only the round
trip of a cache line shows it.

So each measurement waits, for a limited time, until the cores are near, and repeats if they moved apart meanwhile. The
results include the distance.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench import baseline

FAR = 300e-9  # seconds: one core takes 60 ns, neighbors take 120, and parts of a processor that share no cache 500
PAUSE = 0.2  # seconds between two checks
MAX_WAIT = 20.0  # seconds that one row waits for near cores, in one turn of one competitor,
MAX_TOTAL_WAIT = 240.0  # and all of them together

T = TypeVar("T")


def can_measure() -> bool:
    """Return whether the distance can be measured: with two cores and a compiler."""
    if len(os.sched_getaffinity(0)) < 2:
        return False
    try:
        baseline.program()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def apart() -> float:
    """Return the seconds of an undisturbed round trip of a cache line between cores."""
    return min(baseline.measure("apart"))


@dataclass(frozen=True)
class Found(Generic[T]):
    """Result of a measurement, distance of the cores around it, and seconds waited."""

    result: T
    apart: float
    waited: float


def near(
    measure: Callable[[], T], max_wait: float, again: bool, measure_distance: Callable[[], float] = apart
) -> Found[T]:
    """Measure while the cores are near, or after `max_wait` seconds at any distance.

    A measurement during which they moved apart is repeated if `again` is true.
    """
    begun = time.monotonic()
    while True:
        while (before := measure_distance()) > FAR and time.monotonic() - begun < max_wait:
            time.sleep(PAUSE)
        start = time.monotonic()
        result = measure()
        took = time.monotonic() - start
        after = measure_distance()
        waited = time.monotonic() - begun - took
        if after <= FAR or not again or waited + took >= max_wait:
            return Found(result, max(before, after), waited)


def in_words(seen: list[float]) -> str:
    """Return the distances of the cores in all turns, for the end of the table."""
    far = sum(one > FAR for one in seen)
    nanoseconds = sorted(round(one * 1e9) for one in seen)
    return (
        f"Cores: a cache line took {nanoseconds[0]} to {nanoseconds[-1]} ns to the other one and back; more than "
        f"{FAR * 1e9:.0f} ns, which slows down all that passes between processes, in {far} of {len(seen)} turns."
    )

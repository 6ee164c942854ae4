"""How near the cores of this machine are to each other, which changes where the machine is a virtual one.

Its cores are threads of a host, and the host moves them: two of them share one core of the processor for a while, lie
side by side then, and then in parts of it that have no cache in common. What passes between processes takes up to ten
times as long there (4 MB two milliseconds in place of a fourth of one), whoever passes it, and inside the machine
nothing shows that but the time that a cache line takes to the other core and back.

So whoever measures waits until the cores are near, for a while, and measures anew if they have moved apart meanwhile.
Results say where they were.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench import limit

FAR = 300e-9  # seconds: one core takes 60 ns, neighbours take 120, and parts of a processor that share no cache 500
PAUSE = 0.2  # seconds between two looks
PATIENCE = 20.0  # seconds that one row waits for near cores, in one turn of one peer,
IN_ALL = 240.0  # and all of them together

T = TypeVar("T")


def can_look() -> bool:
    """Is there a way between cores, and the program that measures it? Not with one core, or without a compiler."""
    if len(os.sched_getaffinity(0)) < 2:
        return False
    try:
        limit.program()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def apart() -> float:
    """Seconds that a cache line takes from one core to another and back, where nothing is in its way."""
    return min(limit.measure("apart"))


@dataclass(frozen=True)
class Found(Generic[T]):
    """What was measured, how far apart the cores were before or after it, and seconds lost with waiting."""

    what: T
    apart: float
    waited: float


def near(measure: Callable[[], T], patience: float, again: bool, look: Callable[[], float] = apart) -> Found[T]:
    """Measures while the cores are near, or after `patience` seconds wherever they are.

    What was measured while they moved apart is measured `again`, if that may be done.
    """
    begun = time.monotonic()
    while True:
        while (before := look()) > FAR and time.monotonic() - begun < patience:
            time.sleep(PAUSE)
        start = time.monotonic()
        what = measure()
        took = time.monotonic() - start
        after = look()
        waited = time.monotonic() - begun - took
        if after <= FAR or not again or waited + took >= patience:
            return Found(what, max(before, after), waited)


def in_words(seen: list[float]) -> str:
    """For the end of the table: where the cores were in all turns."""
    far = sum(one > FAR for one in seen)
    nanoseconds = sorted(round(one * 1e9) for one in seen)
    return (
        f"Cores: a cache line took {nanoseconds[0]} to {nanoseconds[-1]} ns to the other one and back; more than "
        f"{FAR * 1e9:.0f} ns, which slows down all that passes between processes, in {far} of {len(seen)} turns."
    )

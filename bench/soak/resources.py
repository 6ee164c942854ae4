"""Memory, descriptors and threads of processes over time, and their growth."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WARM_UP = 0.3  # share of the run before which growth is not judged


class Sample(NamedTuple):
    """Resources of a process at one moment."""

    at: float  # s
    memory: float  # MB, anonymous and its share of shared memory; its share of files depends on other processes
    descriptors: float
    threads: float


LIMITS = Sample(0, 40.0, 6.0, 8.0)
"""Growth that is allowed over a run after its warm-up; of memory, at least a tenth of the memory."""


def sample(pid: int, at: float) -> Sample:
    """Read what a process holds.

    Raises:
        OSError: The process has ended.
    """
    proc = Path(f"/proc/{pid}")
    rollup = (proc / "smaps_rollup").read_text()
    sizes = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    kilobytes = sizes["Anonymous:"] + sizes["Pss_Shmem:"]
    return Sample(at, kilobytes / 1000, len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())))


@dataclass
class Growth:
    """Growth of one quantity after the warm-up."""

    level: float  # median
    growth: float  # slope times the time
    limit: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.limit

    def as_json(self) -> dict[str, float | bool]:
        return {
            "median": round(self.level, 1),
            "growth": round(self.growth, 1),
            "limit": round(self.limit, 1),
            "flat": self.is_flat,
        }


def growth(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Return the growth of each resource: the slope of its samples times the time."""
    warm = samples[int(len(samples) * WARM_UP) :]
    result = {}
    for name in ("memory", "descriptors", "threads"):
        values = [float(getattr(one, name)) for one in warm]
        level = statistics.median(values) if values else 0.0
        limit = float(getattr(LIMITS, name))
        slope = statistics.linear_regression([one.at for one in warm], values).slope if len(warm) > 2 else 0.0
        over = slope * (warm[-1].at - warm[0].at) if warm else 0.0
        result[name] = Growth(level, over, max(limit, level / 10) if name == "memory" else limit)
    return result

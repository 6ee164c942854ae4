"""Memory, descriptors and threads of processes over time, and their growth.

The resident memory of a process varies by tens of MB, because the C library keeps what is free in pieces. So a leak
shows in what is in use: bytes of the C library's heap, and blocks of Python's.
"""

import ctypes
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WARM_UP = 0.3  # share of the run before which growth is not judged


class InUse(NamedTuple):
    """Memory of the heaps of a process that is in use."""

    heap: float  # MB in use of the C library's heap
    objects: float  # thousands of blocks of Python's heap


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, which is about all threads."""

    _fields_ = [(f"f{index}", ctypes.c_size_t) for index in range(10)]


def in_use() -> InUse:
    """Return what this process uses; 0 of a heap that does not say."""
    heap = 0.0
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is not None:
        mallinfo.restype = _MallInfo
        found = mallinfo()
        heap = (found.f4 + found.f7) / 1e6  # hblkhd, of blocks that are mapped, and uordblks
    return InUse(heap, sys.getallocatedblocks() / 1000)


class Sample(NamedTuple):
    """Resources of a process at one moment."""

    at: float  # s
    memory: float  # MB, anonymous and its share of shared memory; its share of files depends on other processes
    descriptors: float
    threads: float
    heap: float = 0
    objects: float = 0


LIMITS = Sample(0, 40.0, 6.0, 8.0, 8.0, 16.0)
"""Growth that is allowed over a run after its warm-up; of resident memory, at least a fifth of it."""


def sample(pid: int, at: float, used: InUse) -> Sample:
    """Read what a process holds.

    Args:
        pid: The process.
        at: The time, in seconds.
        used: Its last report.

    Raises:
        OSError: The process has ended.
    """
    proc = Path(f"/proc/{pid}")
    rollup = (proc / "smaps_rollup").read_text()
    sizes = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    kilobytes = sizes["Anonymous:"] + sizes["Pss_Shmem:"]
    descriptors, threads = (len(list((proc / folder).iterdir())) for folder in ("fd", "task"))
    return Sample(at, kilobytes / 1000, descriptors, threads, *used)


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
    for name in Sample._fields[1:]:
        values = [float(getattr(one, name)) for one in warm]
        level = statistics.median(values) if values else 0.0
        limit = float(getattr(LIMITS, name))
        slope = statistics.linear_regression([one.at for one in warm], values).slope if len(warm) > 2 else 0.0
        over = slope * (warm[-1].at - warm[0].at) if warm else 0.0
        result[name] = Growth(level, over, max(limit, level / 5) if name == "memory" else limit)
    return result

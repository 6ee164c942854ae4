"""Where tensors lie: for tests of memory that workers share."""

from pathlib import Path

import torch


def place(x: torch.Tensor) -> tuple[str, int] | None:
    """Which file a tensor's memory is of, and where in it; None if of none. Both ends map the same file."""
    at = x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= at < end:
            return None if inode == "0" else (inode, int(offset, 16) + at - begin)
    raise AssertionError("no such memory")

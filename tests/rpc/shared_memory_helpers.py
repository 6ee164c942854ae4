"""Helpers for tests of tensors in shared memory."""

from pathlib import Path
from typing import Any

import torch


def place(x: torch.Tensor) -> tuple[str, int] | None:
    """Return the mapped file and offset of a tensor; None if it has none."""
    at = x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= at < end:
            return None if inode == "0" else (inode, int(offset, 16) + at - begin)
    raise AssertionError("no such memory")


class Kept(torch.utils.data.Dataset[float]):
    """Shared-memory tensor that forks of its holder access after `go`."""

    def __init__(self, x: torch.Tensor, go: Any) -> None:
        self.x, self.go = x, go

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        assert self.go.wait(60)
        total = float(self.x.sum())
        self.x += 1.0
        return total

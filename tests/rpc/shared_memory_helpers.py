"""Helpers for tests of tensors in shared memory."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.options import Options


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


def use_result_of_killed_peer(
    rank: int,
    n: int,
    init_method: str,
    warm_up: Callable[[], None],
    function: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
) -> float:
    """Return the sum of w1's result plus one, computed after w1 was killed."""
    options = Options(init_method=init_method, transports=("shm",))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    if rank == 1:
        rpc.rpc_sync("w0", abs, (1,))
        signal.pause()
    warm_up()
    got = rpc.rpc_sync("w1", function, args)
    pid = rpc.rpc_sync("w1", os.getpid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("w1", signal.pause)
    got += 1.0
    total = float(got.sum())
    rpc.shutdown(graceful=False)
    return total

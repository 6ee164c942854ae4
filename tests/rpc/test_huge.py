"""Tensors of more than 2 GiB, there and back over every transport. They take some 9 GB of memory."""

from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.options import TRANSPORTS, Options
from telegrad.testing import processes

pytestmark = pytest.mark.slow

SIZE = (1 << 31) + 4099
STEP = 4093  # a prime: no two pages begin alike
NEEDED = 10 << 30


def _pattern() -> torch.Tensor:
    """No part of it can be taken for another."""
    x = torch.zeros(SIZE, dtype=torch.uint8)
    marks = x[::STEP]
    marks.copy_(torch.arange(len(marks), dtype=torch.int64).bitwise_and_(0xFF))
    x[:: STEP * 256] += 7
    x[-1] = 99
    return x


def _same(x: torch.Tensor) -> bool:
    return x.numel() == SIZE and torch.equal(x, _pattern())


def _change(x: torch.Tensor) -> torch.Tensor:
    assert _same(x), "it arrived otherwise than it was sent"
    x[0] = 42
    return x


def _there_and_back(rank: int, n: int, init_method: str, transport: str) -> bool:
    options = Options(init_method=init_method, rpc_timeout=240, transports=(transport,))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    good = True
    if rank == 0:
        x = _pattern()
        back = rpc.rpc_sync("w1", _change, args=(x,))
        good = back.numel() == SIZE and int(back[0]) == 42
        back[0] = x[0]
        good = good and torch.equal(back, x)
    rpc.shutdown()
    return good


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_than_2_gib(transport: str) -> None:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) << 10
    if free < NEEDED:
        pytest.skip(f"takes {NEEDED >> 30} GiB of free memory, and there are {free >> 30}")
    assert processes(2, _there_and_back, transport, timeout=400) == [True, True]

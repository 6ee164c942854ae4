"""Round trips of tensors of more than 2 GiB over every transport.

They need about 7 GB of memory.
"""

from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.options import TRANSPORTS, Options
from telegrad.testing import processes

pytestmark = pytest.mark.slow

SIZE = (1 << 31) + 4099
STEP = 4093  # a prime: no two pages begin alike
NEEDED = 8 << 30


def _marks() -> torch.Tensor:
    """Return the values of every STEPth byte; the others are 0."""
    marks = torch.arange((SIZE + STEP - 1) // STEP, dtype=torch.int64)
    return (marks * 31 + marks // 256 + 1).to(torch.uint8)


def _pattern() -> torch.Tensor:
    x = torch.zeros(SIZE, dtype=torch.uint8)
    x[::STEP] = _marks()
    return x


def _same(x: torch.Tensor) -> bool:
    """Return whether `x` is the pattern, without a second copy of it."""
    marks = _marks()
    total = sum(int(part.sum()) for part in x.split(1 << 24))
    return x.numel() == SIZE and torch.equal(x[::STEP], marks) and total == int(marks.sum())


def _change(x: torch.Tensor) -> torch.Tensor:
    assert _same(x), "it arrived otherwise than it was sent"
    x[0] = 42
    return x


def _there_and_back(rank: int, n: int, init_method: str, transport: str) -> bool:
    options = Options(init_method=init_method, rpc_timeout=900, transports=(transport,))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    good = True
    if rank == 0:
        x = _pattern()
        back = rpc.rpc_sync("w1", _change, args=(x,))
        good = int(back[0]) == 42
        back[0] = x[0]
        good = good and _same(back) and _same(x)
    rpc.shutdown()
    return good


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_more_than_2_gib(transport: str) -> None:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) << 10
    if free < NEEDED:
        pytest.skip(f"takes {NEEDED >> 30} GiB of free memory, and there are {free >> 30}")
    assert processes(2, _there_and_back, transport, timeout=1200) == [True, True]

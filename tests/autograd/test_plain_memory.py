"""Memory of two processes while losses outside of contexts are dropped."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.testing import Processes, eventually
from telegrad.worker.default_worker import current_worker

WARM_UP, PASSES = 10_000, 100_000
MOST_RECORDS = 20_000  # while passes run: notifications of freed tensors are batched
MOST_BYTES = 64 * PASSES  # of resident memory; a record with its graph has more than 1,000 bytes
MOST_BLOCKS = PASSES // 10  # of Python's allocator; a leak of one object per pass has 100,000


class Use(NamedTuple):
    """Memory that a process uses."""

    records: int
    blocks: int
    resident: int


class Weight:
    """Parameter of the server."""

    tensor: Tensor = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def scale(x: Tensor) -> Tensor:
    return x * Weight.tensor


def records() -> int:
    """Return the number of records of messages, sent and received."""
    worker = current_worker()
    assert worker is not None
    plain: Any = worker.autograd.plain
    return len(plain.sends) + len(plain.consumed) + len(plain.receipts)


def use() -> Use:
    """Return the use of memory when all that was dropped is gone."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Use(records(), sys.getallocatedblocks(), resident)


@contextmanager
def joined(rank: int, world_size: int, init_method: str) -> Iterator[None]:
    options = rpc.Options(init_method=init_method, plain_backward=True)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    yield
    rpc.shutdown()


def drop_losses(rank: int, world_size: int, init_method: str) -> list[tuple[Use, Use]] | None:
    """Run forward passes from w0; return the use of both processes, before and after."""
    with joined(rank, world_size, init_method):
        if rank:
            return None
        run(WARM_UP)
        before = settled()
        run(PASSES)
        return list(zip(before, settled(), strict=True))


def run(passes: int) -> None:
    x = torch.ones(3, requires_grad=True)
    for number in range(passes):
        rpc.rpc_sync("w1", scale, (x,)).sum()
        if number % 1000 == 0:
            assert max(records(), rpc.rpc_sync("w1", records)) < MOST_RECORDS


def settled() -> list[Use]:
    """Return the use of both processes when no records are left."""
    uses: list[Use] = []

    def no_records() -> bool:
        uses[:] = [use(), rpc.rpc_sync("w1", use)]
        return all(each.records == 0 for each in uses)

    eventually(no_records, what="the end of all records")
    return uses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dropped_losses_leave_memory_flat_in_both_processes() -> None:
    with Processes(2, drop_losses) as group:
        uses, _ = group.results(240.0)
    for before, after in uses:
        assert after.blocks - before.blocks < MOST_BLOCKS, uses
        assert after.resident - before.resident < MOST_BYTES, uses

"""Items of streams reside in shared memory at the receiver, as results do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from shared_memory_helpers import place

from telegrad import rpc
from telegrad.options import Options
from telegrad.testing import cluster, eventually

N = 300_000  # floats, 1.2 MB
ITEMS = 12  # more than one batch


def tensors(n: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield torch.full((N,), float(i))


async def tensors_async(n: int) -> AsyncIterator[torch.Tensor]:
    for item in tensors(n):
        await asyncio.sleep(0)
        yield item


def read_with_for(function: Any, n: int) -> list[torch.Tensor]:
    return list(rpc.stream("w1", function, (n,)))


def read_with_async_for(function: Any, n: int) -> list[torch.Tensor]:
    async def read() -> list[torch.Tensor]:
        return [item async for item in rpc.stream("w1", function, (n,))]

    return asyncio.run(read())


on_each_way_to_read = pytest.mark.parametrize("read", [read_with_for, read_with_async_for])
on_each_generator = pytest.mark.parametrize("function", [tensors, tensors_async])


def files_of_results(n: int) -> set[str | None]:
    """Return the files with the memory of results; None for private memory.

    The results exist at the same time.
    """
    kept = [rpc.rpc_sync("w1", torch.full, ((N,), 1.0)) for _ in range(n)]
    return files_of(kept)


def files_of(tensors: list[torch.Tensor]) -> set[str | None]:
    places = [place(x) for x in tensors]
    return {found and found[0] for found in places}


@on_each_way_to_read
@on_each_generator
def test_items_reside_in_shared_memory(function: Any, read: Callable[..., list[torch.Tensor]]) -> None:
    with cluster(2, Options(transports=("shm",))):
        eventually(lambda: None not in files_of_results(ITEMS))  # the memory grows while it is used
        files = files_of_results(ITEMS)
        items = read(function, ITEMS)
        assert files_of(items) == files
        assert None not in files
        assert len({place(item) for item in items}) == ITEMS
        for item in items:
            item += 1  # belongs to the receiver
        assert [(float(item[0]), float(item[-1])) for item in items] == [(i + 1.0, i + 1.0) for i in range(ITEMS)]
        del item, items


@on_each_way_to_read
def test_items_over_a_socket_reside_in_private_memory(read: Callable[..., list[torch.Tensor]]) -> None:
    with cluster(2, Options(transports=("unix",))):
        assert [place(item) for item in read(tensors, 3)] == [None] * 3

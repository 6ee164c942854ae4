"""Names and paths in diagnostics of calls, streams, maps and retries."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.testing import Cluster, Gate, eventually
from telegrad.worker.calls.callables import full_name_of, name_of


def identity(x: Any) -> Any:
    return x


def numbers(x: Any) -> Iterator[Any]:
    yield x


class Source:
    def numbers(self, x: Any) -> Iterator[Any]:
        yield x


released = asyncio.Event()


async def wait(x: int) -> int:
    await released.wait()
    return x


async def later_steps() -> AsyncIterator[int]:
    yield 1
    await released.wait()


async def finish() -> None:
    released.set()


@pytest.fixture(autouse=True)
def new_event() -> None:
    global released
    released = asyncio.Event()


def requests(group: Cluster) -> list[str]:
    return [each.function for each in group[1].debug_info().requests]


def calls(group: Cluster) -> list[str]:
    return [each.function for each in group[0].debug_info().calls]


def test_a_map(clean: Cluster) -> None:
    gate = Gate()
    results = rpc.map("w1", lambda x: gate.enter() or x, [1, 2], chunk=2, in_flight=1)
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(results))
    reader.start()
    assert gate.entered.acquire(timeout=10)
    assert [name.endswith("<lambda>") for name in requests(clean)] == [True]
    (name,) = calls(clean)
    assert name.endswith("<lambda> (a chunk of rpc.map with 2 items)")
    gate.open()
    reader.join(10)
    assert got == [1, 2]


def test_a_map_of_coroutines(clean: Cluster) -> None:
    got: list[int] = []
    results = rpc.map("w1", wait, [1, 2], chunk=2)
    reader = threading.Thread(target=lambda: got.extend(results))
    reader.start()
    eventually(lambda: [name.endswith("wait") for name in requests(clean)] == [True])
    running = clean[1]._worker.running
    eventually(lambda: [each.function.rpartition(".")[2] for each in running.snapshot()] == ["wait"])
    rpc.rpc_sync("w1", finish)
    reader.join(10)
    assert got == [1, 2]


def test_a_stream(clean: Cluster) -> None:
    gate = Gate()

    def steps() -> Iterator[int]:
        yield 1
        gate.enter()
        yield 2

    stream = rpc.stream("w1", steps)
    assert next(stream) == 1
    assert gate.entered.acquire(timeout=10)
    # The first reply leaves before its request ends.
    eventually(lambda: (names := requests(clean)) and all("steps" in name for name in names))
    eventually(lambda: (names := calls(clean)) and all(re.fullmatch("a step of .*steps", name) for name in names))
    gate.open()
    assert list(stream) == [2]


def test_an_asynchronous_stream(clean: Cluster) -> None:
    stream = rpc.stream("w1", later_steps)
    assert next(stream) == 1
    eventually(lambda: [name.endswith("steps") for name in requests(clean)] == [True])
    rpc.rpc_sync("w1", finish)
    assert list(stream) == []


@pytest.mark.parametrize("where", ["args[0]", "kwargs['x']"])
def test_paths_in_errors(clean: Cluster, where: str) -> None:
    lock = threading.Lock()
    given: Any = {"args": (lock,)} if where == "args[0]" else {"kwargs": {"x": lock}}
    source = rpc.remote("w1", Source)
    tries: list[Any] = [
        lambda: rpc.rpc_sync("w1", identity, **given),
        lambda: rpc.rpc_sync("w1", identity, **given, retry=rpc.Retry()),
        lambda: list(rpc.stream("w1", numbers, **given)),
        lambda: list(source.stream().numbers(*given.get("args", ()), **given.get("kwargs", {}))),
    ]
    for attempt in tries:
        with pytest.raises(SerializationError) as caught:
            attempt()
        assert f"(at {where}, of type" in str(caught.value)


def test_the_path_of_an_item(clean: Cluster) -> None:
    with pytest.raises(SerializationError) as caught:
        list(rpc.map("w1", identity, [1, [threading.Lock()]]))
    assert "(at args[0][0], of type" in str(caught.value)


def test_functions_of_torch_have_the_names_that_programs_use() -> None:
    assert name_of(torch.add) == "add"
    assert name_of(torch.nn.functional.relu) == "relu"
    assert full_name_of(Source.numbers).endswith("test_shown_names.Source.numbers")

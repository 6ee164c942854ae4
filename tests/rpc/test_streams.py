"""Streams: the items of generators on other workers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from stream_helpers import GENERATORS, bursts, endless, endless_async, numbers

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.streams.stream import Stream
from telegrad.testing import Gate, Local, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]

WORKERS = ("w1", "w0")  # another worker, and this one


# ---- items


@pytest.mark.parametrize("to", WORKERS)
@pytest.mark.parametrize("function", GENERATORS)
@pytest.mark.parametrize("n", [0, 1, 2, 300, 5000])
def test_items_arrive_in_order(function: Any, to: str, n: int) -> None:
    assert list(rpc.stream(to, function, (n,))) == list(range(n))
    assert list(rpc.stream(to, function, kwargs={"n": n}, prefetch=1)) == list(range(n))


@pytest.mark.parametrize("function", GENERATORS)
def test_async_for(function: Any) -> None:
    async def read() -> list[int]:
        return [item async for item in rpc.stream("w1", function, (1000,))]

    assert asyncio.run(read()) == list(range(1000))


def test_any_callable_that_returns_an_iterator() -> None:
    assert list(rpc.stream("w1", iter, ([1, 2],))) == [1, 2]
    assert list(rpc.stream("w1", lambda: (i * i for i in range(3)))) == [0, 1, 4]
    assert list(rpc.stream("w1", lambda: rpc.stream("w0", numbers, (3,)))) == [0, 1, 2]


def test_through_references_and_modules() -> None:
    owned = rpc.remote("w1", Corpus, (3,))
    assert list(owned.stream().lines()) == ["line 0", "line 1", "line 2"]
    assert list(owned.stream(timeout=5, prefetch=1).lines_async()) == ["line 0", "line 1", "line 2"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        next(owned.stream().nothing())
    module = RemoteModule("w1", Steps)
    x = torch.ones(2)
    assert [y.tolist() for y in module.steps.stream(x, 2)] == [[2.0, 2.0], [3.0, 3.0]]


class Corpus:
    def __init__(self, n: int) -> None:
        self.n = n

    def lines(self) -> Iterator[str]:
        yield from (f"line {i}" for i in range(self.n))

    async def lines_async(self) -> AsyncIterator[str]:
        for line in self.lines():
            await asyncio.sleep(0)
            yield line


class Steps(torch.nn.Module):
    def steps(self, x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
        for _ in range(n):
            x += 1
            yield x


def test_a_worker_object_streams() -> None:
    with cluster(2, names="other{}", current=None) as group:
        assert list(group[0].stream("other1", numbers, (3,))) == [0, 1, 2]


def changing(kind: str, n: int) -> Iterator[Any]:
    """Yield one object that changes with each step."""
    item: Any = {
        "list": [0],
        "dict": {"a": [0]},
        "small": torch.zeros(1),
        "large": torch.zeros(1 << 16),
        "object": Box(),
    }[kind]
    for _ in range(n):
        yield item
        if kind == "dict":
            item["a"][0] += 1
        elif kind == "object":
            item.value += 1
        else:
            item[0] += 1


class Box:
    value = 0


def value_of(item: Any) -> Any:
    if isinstance(item, Box):
        return item.value
    if isinstance(item, dict):
        return item["a"][0]
    return item[0]


@pytest.mark.parametrize("kind", ["list", "dict", "small", "large", "object"])
def test_later_steps_do_not_change_items(kind: str) -> None:
    assert [int(value_of(item)) for item in rpc.stream("w1", changing, (kind, 20))] == list(range(20))

    async def changing_async(kind: str) -> AsyncIterator[Any]:
        for item in changing(kind, 20):
            yield item

    assert [int(value_of(item)) for item in rpc.stream("w1", changing_async, (kind,))] == list(range(20))


def mixed() -> Iterator[Any]:
    shared = torch.arange(4.0)
    yield from (
        1,
        "text",
        b"bytes",
        None,
        2.5,
        True,
        (1, [2, {"three": 3}]),
        shared,
        (shared, shared[:2]),
        Box(),
        {1, 2},
    )
    yield [list(range(1000)), "x" * 100_000, torch.ones(3, dtype=torch.bfloat16).expand(2, 3)]


def test_items_of_any_type() -> None:
    items = list(rpc.stream("w1", mixed))
    assert items[:7] == [1, "text", b"bytes", None, 2.5, True, (1, [2, {"three": 3}])]
    assert items[5] is True
    assert torch.equal(items[7], torch.arange(4.0))
    whole, part = items[8]
    part[0] = 7
    assert whole[0] == 7  # tensors of one item that share memory arrive so
    assert isinstance(items[9], Box)
    assert items[10] == {1, 2}
    assert items[11][2].shape == (2, 3)


def test_references_as_items() -> None:
    def references() -> Iterator[Any]:
        for i in range(3):
            yield rpc.RRef(i)

    assert [rref.to_here() for rref in rpc.stream("w1", references)] == [0, 1, 2]


def test_no_item_is_held_back_while_a_step_waits() -> None:
    gate = Gate()
    stream = rpc.stream("w1", bursts, (gate,))
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    gate.open()
    assert list(stream) == [3]
    gate = Gate()

    async def read() -> None:
        stream = rpc.stream("w1", bursts, (gate,))
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        gate.open()
        assert [item async for item in stream] == [3]

    asyncio.run(read())


@pytest.mark.parametrize("function", [endless, endless_async])
@pytest.mark.parametrize("prefetch", [1, 2, 7, 64])
def test_a_slow_reader_stops_the_generator(function: Any, prefetch: int) -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    with rpc.stream("w1", function, (ended, counts), prefetch=prefetch) as stream:
        assert next(stream) == 0
        eventually(lambda: is_idle(stream))
        for expected in range(1, 100):
            assert next(stream) == expected
        eventually(lambda: is_idle(stream))
        assert 100 <= len(counts.value) <= 100 + prefetch + 2  # an asynchronous one may be a step ahead of its credit
    assert ended.value.wait(10)


def is_idle(stream: Stream[Any]) -> bool:
    """Return whether the reader requests no more items."""
    return not stream._receiver._is_pulling


def test_large_items_are_fetched_by_bytes() -> None:
    def large(counts: Local[list[int]]) -> Iterator[torch.Tensor]:
        for i in range(100):
            counts.value.append(i)
            yield torch.full((1 << 20,), float(i))

    counts = Local(list[int]())
    with rpc.stream("w1", large, (counts,)) as stream:
        assert next(stream)[0] == 0
        eventually(lambda: is_idle(stream))
        assert 4 < len(counts.value) <= 12  # of 4 MiB: not 256 of them
        assert next(stream)[-1] == 1


# ---- torch's state


def test_autograd_context() -> None:
    weight = torch.ones(3, requires_grad=True)

    def scaled(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
        for i in range(1, n + 1):
            yield x * i

    async def scaled_async(x: torch.Tensor, n: int) -> AsyncIterator[torch.Tensor]:
        for i in range(1, n + 1):
            await asyncio.sleep(0)
            yield x * i

    for function in (scaled, scaled_async):
        with autograd.context() as context:
            loss = torch.stack([y.sum() for y in rpc.stream("w1", function, (weight, 4))]).sum()
            autograd.backward(context, [loss])
            assert torch.equal(autograd.get_gradients(context)[weight], torch.full((3,), 10.0))


def states(n: int) -> Iterator[tuple[bool, bool, bool]]:
    for _ in range(n):
        yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def test_each_step_runs_in_the_state_of_the_opening_code() -> None:
    with torch.no_grad():
        stream = rpc.stream("w1", states, (3,), prefetch=1)
    assert list(stream) == 3 * [(False, False, False)]
    with torch.inference_mode():
        stream = rpc.stream("w1", states, (3,), prefetch=1)
    assert list(stream) == 3 * [(False, True, False)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = rpc.stream("w1", states, (3,), prefetch=1)
    assert list(stream) == 3 * [(True, False, True)]
    stream = rpc.stream("w1", states, (3,), prefetch=1)
    with torch.no_grad():
        assert list(stream) == 3 * [(True, False, False)]


def own_state() -> Iterator[tuple[bool, bool]]:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def test_the_state_of_a_generator_follows_its_steps() -> None:
    stream = rpc.stream("w1", own_state, prefetch=1)
    for _ in range(3):
        assert next(stream) == (False, True)
        assert rpc.rpc_sync("w1", torch.is_grad_enabled)
    assert list(stream) == [(True, False)]

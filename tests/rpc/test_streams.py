"""Streams: the items of generators on other workers."""

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, Local, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]

WORKERS = ("w1", "w0")  # another worker, and this one


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


async def numbers_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        if i % 3 == 0:
            await asyncio.sleep(0)
        yield i


def endless(ended: Local[threading.Event], counts: Local[list[int]]) -> Iterator[int]:
    try:
        for i in itertools.count():
            counts.value.append(i)
            yield i
    finally:
        ended.value.set()


async def endless_async(ended: Local[threading.Event], counts: Local[list[int]]) -> AsyncIterator[int]:
    try:
        for i in itertools.count():
            counts.value.append(i)
            yield i
            await asyncio.sleep(0)
    finally:
        ended.value.set()


async def waits_forever(ended: Local[threading.Event], counts: Local[list[int]]) -> AsyncIterator[int]:
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        ended.value.set()


GENERATORS = [numbers, numbers_async]
ENDLESS = [endless, endless_async, waits_forever]


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


def bursts(gate: Gate) -> Iterator[int]:
    yield 0
    yield 1
    yield 2
    gate.enter()
    yield 3


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
        eventually(is_idle)
        for expected in range(1, 100):
            assert next(stream) == expected
        eventually(is_idle)
        assert 100 <= len(counts.value) <= 100 + prefetch + 2  # an asynchronous one may be a step ahead of its credit
    assert ended.value.wait(10)


def is_idle() -> bool:
    return not rpc.api._worker().engine.stats()["pending_calls"]


def test_large_items_are_fetched_by_bytes() -> None:
    def large(counts: Local[list[int]]) -> Iterator[torch.Tensor]:
        for i in range(100):
            counts.value.append(i)
            yield torch.full((1 << 20,), float(i))

    counts = Local(list[int]())
    with rpc.stream("w1", large, (counts,)) as stream:
        assert next(stream)[0] == 0
        eventually(is_idle)
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


# ---- the end


@pytest.mark.parametrize("function", ENDLESS)
@pytest.mark.parametrize("how", ["with", "close", "collect", "error", "aclose", "cancel"])
def test_an_early_end_closes_the_generator(function: Any, how: str) -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    arguments = (ended, counts)

    async def read_async() -> None:
        stream = rpc.stream("w1", function, arguments)
        async with stream:
            assert await anext(stream) == 0
            if how == "aclose":
                await stream.aclose()

    async def cancel() -> None:
        stream = rpc.stream("w1", waits_forever, arguments)
        assert await anext(stream) == 0
        task = asyncio.create_task(stream.__anext__())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.value.wait(10)  # not only when the stream is collected

    if how == "with":
        with rpc.stream("w1", function, arguments) as stream:
            assert next(stream) == 0
    elif how == "close":
        stream = rpc.stream("w1", function, arguments)
        assert next(stream) == 0
        stream.close()
        stream.close()
    elif how == "collect":
        stream = rpc.stream("w1", function, arguments)
        assert next(stream) == 0
        del stream
        gc.collect()
    elif how == "error":
        stream = rpc.stream("w1", function, arguments)
        assert next(stream) == 0  # a generator that has not begun has no ``finally`` to run
        with pytest.raises(KeyError), stream:
            raise KeyError("of the reader")
    else:
        asyncio.run(read_async() if how == "aclose" else cancel())
    assert ended.value.wait(10)


def test_close_while_a_step_runs() -> None:
    gate, ended = Gate(), Local(threading.Event())

    def waiting() -> Iterator[int]:
        try:
            yield 0
            gate.enter()
            yield 1
        finally:
            ended.value.set()

    stream = rpc.stream("w1", waiting)
    assert next(stream) == 0
    gate.wait_for()
    stream.close()
    assert not ended.value.is_set()
    gate.open()
    assert ended.value.wait(10)


@pytest.mark.parametrize("items", [0, 1, 2])
def test_a_generator_in_a_long_step_asks_whether_its_reader_has_closed(items: int) -> None:
    begun, ended = threading.Event(), threading.Event()
    said: list[bool] = []
    local = Local((begun, ended, said))

    def slow(local: Any, items: int) -> Iterator[int]:
        begun, ended, said = local.value
        yield from range(items)
        said.append(rpc.cancelled())
        begun.set()
        eventually(rpc.cancelled)
        ended.set()
        yield items

    stream = rpc.stream("w1", slow, (local, items))
    assert [next(stream) for _ in range(items)] == list(range(items))
    assert begun.wait(10)
    stream.close()
    assert ended.wait(10)
    assert said == [False]


def test_an_asynchronous_generator_sees_that_its_reader_has_closed() -> None:
    said: list[bool] = []
    ended = threading.Event()
    local = Local((ended, said))

    async def slow(local: Any) -> AsyncIterator[int]:
        ended, said = local.value
        yield 0
        said.append(rpc.cancelled())
        try:
            await asyncio.Event().wait()
        finally:
            said.append(rpc.cancelled())
            ended.set()

    with rpc.stream("w1", slow, (local,)) as stream:
        assert next(stream) == 0
        eventually(lambda: said == [False])
    assert ended.wait(10)
    assert said == [False, True]


def test_close_before_the_first_item() -> None:
    gate, ended = Gate(), Local(threading.Event())

    def waiting() -> Iterator[int]:
        try:
            gate.enter()
            yield 0
        finally:
            ended.value.set()

    stream = rpc.stream("w1", waiting)
    gate.wait_for()
    stream.close()
    gate.open()
    assert ended.value.wait(10)


def test_close_before_the_generator_exists() -> None:
    gate, ended = Gate(), Local(threading.Event())

    def late() -> Iterator[int]:
        gate.enter()
        return endless(ended, Local(list[int]()))

    stream = rpc.stream("w1", late)
    gate.wait_for()
    stream.close()
    gate.open()
    assert ended.value.wait(10)


def test_a_shutdown_does_not_wait_for_streams_that_are_not_read() -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    with cluster(2):
        streams = [rpc.stream("w1", function, (ended, counts)) for function in ENDLESS]
        assert [next(stream) for stream in streams] == [0, 0, 0]
    assert ended.value.is_set()
    for stream in streams:
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            list(stream)


def test_a_shutdown_waits_for_streams_that_are_read() -> None:
    gate = Gate()
    read: list[list[int]] = []
    with cluster(2) as group:

        def reader() -> None:
            with group[0]:
                read.append(list(rpc.stream("w1", bursts, (gate,))))

        thread = threading.Thread(target=reader)
        thread.start()
        gate.wait_for()
        arrived = [worker._worker.shutdown._stages[0]._machine for worker in group]

        def open_late() -> None:
            eventually(lambda: all(machine.arrived for machine in arrived))
            gate.open()

        opener = threading.Thread(target=open_late)
        opener.start()
    thread.join(10)
    opener.join(10)
    assert read == [[0, 1, 2, 3]]


def test_a_shutdown_of_one_worker_closes_its_streams() -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    with cluster(2, graceful=False) as group:
        stream = rpc.stream("w1", endless, (ended, counts))
        assert next(stream) == 0
        group[0].shutdown(graceful=False)
        assert ended.value.wait(10)
        eventually(lambda: not Streams.of(group[1]._worker).producers)


def test_no_thread_is_held_by_streams_that_are_not_read(two: Cluster) -> None:
    with cluster(2, rpc.Options(num_worker_threads=1)):
        ended, counts = Local(threading.Event()), Local(list[int]())
        streams = [rpc.stream("w1", endless, (ended, counts), prefetch=2) for _ in range(50)]
        assert [next(stream) for stream in streams] == [0] * 50
        assert rpc.rpc_sync("w1", max, (1, 2), timeout=10) == 2
        for stream in streams:
            stream.close()

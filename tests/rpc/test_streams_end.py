"""How streams end: early, with the shutdown of a worker, or closed by the callee."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from stream_helpers import ENDLESS, bursts, endless, numbers, waits_forever

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, StreamError, WorkerLost
from telegrad.streams.batches import Batch, State
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, Local, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]


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


def test_close_wakes_a_reader_that_waits(two: Cluster) -> None:
    gate, raised = Gate(), list[BaseException]()

    def waiting() -> Iterator[int]:
        yield 0
        yield gate.enter() or 1

    def read() -> None:
        with two[0], pytest.raises(StreamError, match="was closed after 1 items") as caught:
            next(stream)
        raised.append(caught.value)

    stream = rpc.stream("w1", waiting, timeout=0)
    assert next(stream) == 0
    reader = threading.Thread(target=read)
    reader.start()
    gate.wait_for()
    receiver = stream._receiver
    eventually(lambda: receiver._is_slow and not receiver._may_hold)  # it has asked for items that are held back
    stream.close()
    eventually(lambda: raised)  # while the generator's step still runs
    gate.open()
    reader.join()


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


@pytest.mark.parametrize(("item", "prefetch"), [(1, 1), (torch.zeros(1 << 20), 256)], ids=["no credit", "large"])
def test_an_asynchronous_generator_that_goes_on_when_it_is_canceled_is_closed(item: Any, prefetch: int) -> None:
    waits, ended = threading.Event(), threading.Event()
    local = Local((waits, ended))

    async def goes_on(local: Any, item: Any) -> AsyncIterator[Any]:
        waits, ended = local.value
        try:
            yield 0
            waits.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            yield item  # no request will ask for it
        finally:
            ended.set()

    with rpc.stream("w1", goes_on, (local, item), prefetch=prefetch) as stream:
        assert next(stream) == 0
        assert waits.wait(10)
    assert ended.wait(10)


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


def begin_to_run(ran: Local[list[str]]) -> Iterator[int]:
    ran.value.append("function")
    return iter((1, 2))


def yield_one(ran: Local[list[str]]) -> Iterator[int]:
    ran.value.append("generator")
    yield 1


class WithStream:
    def begin(self, ran: Local[list[str]]) -> Iterator[int]:
        return begin_to_run(ran)


@pytest.mark.parametrize("how", ["close", "timeout", "task", "method"])
@pytest.mark.parametrize("function", [begin_to_run, yield_one])
def test_a_stream_closed_while_its_request_is_queued_never_runs(function: Any, how: str) -> None:
    ran, gate = Local(list[str]()), Gate()

    async def read(timeout: float) -> None:
        async with rpc.stream("w1", function, (ran,), timeout=timeout) as stream:
            await anext(stream)

    async def cancel() -> None:
        reading = asyncio.create_task(read(0))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    with cluster(2, options=rpc.Options(num_worker_threads=1)) as group:
        holder = rpc.remote("w1", WithStream)
        holder.to_here()
        busy = rpc.rpc_async("w1", gate.enter)
        gate.wait_for()
        stats = group[1]._worker.engine.stats
        arrived = stats()["requests"]
        if how == "close":
            rpc.stream("w1", function, (ran,)).close()
        elif how == "timeout":
            with pytest.raises(RpcTimeout):
                asyncio.run(read(0.01))
        elif how == "task":
            asyncio.run(cancel())
        else:
            holder.stream().begin(ran).close()
        eventually(lambda: stats()["requests"] > arrived)
        eventually(lambda: [request.state for request in group[1].debug_info().requests] == ["running"])
        gate.open()
        busy.wait()
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1  # queued behind the stream
        assert ran.value == []
        assert not Streams.of(group[0]._worker).receivers
        del holder


def test_a_function_that_prepares_a_stream_asks_whether_its_reader_has_closed() -> None:
    gate, seen = Gate(), Local(threading.Event())

    def prepare() -> Iterator[int]:
        gate.entered.release()
        eventually(rpc.cancelled)
        seen.value.set()
        return iter(())

    stream = rpc.stream("w1", prepare)
    gate.wait_for()
    stream.close()
    assert seen.value.wait(10)


class Closable:
    """Iterator that notes its close, also before its first step."""

    def __init__(self, closed: threading.Event) -> None:
        self.close = closed.set

    def __next__(self) -> int:
        return 0


def test_close_before_the_generator_exists() -> None:
    gate, ended = Gate(), Local(threading.Event())

    def late() -> Closable:
        gate.enter()
        return Closable(ended.value)

    stream = rpc.stream("w1", late)  # type: ignore[arg-type, var-annotated]
    gate.wait_for()
    stream.close()
    gate.open()
    assert ended.value.wait(10)


def test_a_close_that_its_callee_has_handled_before_the_generator_exists(two: Cluster) -> None:
    gate, ended = Gate(), Local(threading.Event())

    def late() -> Closable:
        gate.enter()
        return Closable(ended.value)

    stats = two[1]._worker.engine.stats
    before = stats()["requests"]
    stream = rpc.stream("w1", late)  # type: ignore[arg-type, var-annotated]
    gate.wait_for()
    stream.close()
    eventually(lambda: stats()["requests"] >= before + 2 and stats()["running_requests"] == 1)
    assert stats()["queued_requests"] == 0
    gate.open()
    assert ended.value.wait(10)


def test_an_iterator_that_exists_after_the_loss_of_its_caller_is_closed() -> None:
    gate, closed = Gate(), Local(threading.Event())

    def late() -> Closable:
        gate.enter()
        return Closable(closed.value)

    with cluster(2, graceful=False) as group:
        stream = rpc.stream("w1", late)  # type: ignore[arg-type, var-annotated]
        gate.wait_for()
        group[0].shutdown(graceful=False)
        eventually(lambda: 0 in group[1]._worker.members.lost)
        gate.open()
        assert closed.value.wait(10)
        eventually(lambda: not Streams.of(group[1]._worker).producers)
        with pytest.raises(NotInitialized):
            next(stream)


def test_a_shutdown_does_not_wait_for_streams_that_are_not_read() -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    with cluster(2):
        streams = [rpc.stream("w1", function, (ended, counts)) for function in ENDLESS]
        assert [next(stream) for stream in streams] == [0, 0, 0]
    assert ended.value.is_set()
    for stream in streams:
        with pytest.raises((NotInitialized, WorkerLost)):  # the callee may be the first one to close it
            list(stream)


def test_a_stream_that_its_callee_closes_does_not_seem_complete(two: Cluster) -> None:
    ended, counts = Local(threading.Event()), Local(list[int]())
    stream = rpc.stream("w1", waits_forever, (ended, counts))
    assert next(stream) == 0
    streams = Streams.of(two[1]._worker)
    (producer,) = streams.producers.values()
    eventually(lambda: producer._request is not None)  # the next request has arrived
    streams.close()  # as after the loss of the caller
    with pytest.raises(WorkerLost, match="it has closed the stream of waits_forever before its end") as caught:
        list(stream)
    assert (caught.value.name, caught.value.incarnation) == ("w1", two[1]._worker.incarnation)
    assert ended.value.wait(10)


def test_a_request_that_arrives_while_its_callee_closes_the_stream(two: Cluster) -> None:
    stream = rpc.stream("w1", numbers, (9,), prefetch=1)
    assert next(stream) == 0
    (producer,) = Streams.of(two[1]._worker).producers.values()
    producer.close()
    assert Batch(*producer.pull(1)).state == State.CLOSED
    with pytest.raises(WorkerLost, match="it has closed the stream of numbers before its end"):
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
        (receiver,) = Streams.of(group[0]._worker).receivers.values()
        eventually(lambda: receiver._taken == 3 and receiver._reader is not None)  # only then the shutdown waits for it
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

"""Workers that leave a dynamic group, what they finish first, and later calls."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, ShutdownTimeout, WorkerLost
from telegrad.rpc.functions import async_execution
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Local, cluster, eventually

SOON_AGAIN = rpc.Retry(attempts=100, backoff=0.01, max_backoff=0.01, jitter=False)


class Step:
    """Something that a handler waits for."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.future: torch.futures.Future[int] = torch.futures.Future()
        self.local = Local(self)


async def waits(step: Local[Step], value: int) -> int:
    step.value.begun.set()
    while not step.value.go_on.is_set():
        await asyncio.sleep(0.001)
    return value


@async_execution
def completes(step: Local[Step], value: int) -> Any:
    step.value.begun.set()
    return step.value.future.then(lambda _: value)


class Holder:
    async def waits(self, step: Local[Step], value: int) -> int:
        return await waits(step, value)


def calls_of(to: str, step: Step) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return functions that begin a call and return one that waits for its result, 7."""
    holder = rpc.remote(to, Holder)

    def future(function: Any, **more: Any) -> Callable[[], Any]:
        return rpc.rpc_async(to, function, (step.local, 7), **more).wait

    return {
        "async def": lambda: future(waits),
        "async_execution": lambda: future(completes),
        "retry": lambda: future(waits, retry=rpc.Retry()),
        "method": lambda: holder.rpc_async().waits(step.local, 7).wait,
        "remote": lambda: rpc.remote(to, waits, (step.local, 7)).to_here,
    }


@pytest.fixture
def group() -> Iterator[Cluster]:
    with cluster(2, dynamic=True) as workers:
        yield workers


@pytest.mark.parametrize("kind", ["async def", "async_execution", "retry", "method", "remote"])
def test_a_worker_that_leaves_finishes_deferred_requests(group: Cluster, kind: str) -> None:
    step, leaving = Step(), rpc.Worker("late", store=group.store)
    calls = calls_of("late", step)
    wait = calls.pop(kind)()
    calls.clear()  # with the reference of `Holder`
    results: list[Any] = []
    reader = threading.Thread(target=lambda: results.append(wait()))
    reader.start()
    assert step.begun.wait(10)
    eventually(lambda: leaving.debug_info().counts.parked_requests == (kind == "remote"))  # `to_here` has arrived
    shutdown = threading.Thread(target=leaving.shutdown)
    shutdown.start()
    eventually(lambda: "late" not in [info.name for info in group[0]._worker.members.infos()])
    assert not results
    assert shutdown.is_alive()
    step.go_on.set()
    step.future.set_result(0)
    for thread in (reader, shutdown):
        thread.join(10)
        assert not thread.is_alive()
    assert results == [7]


def test_a_worker_that_leaves_finishes_requests_whose_inputs_are_ready(
    group: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, leaving = Step(), rpc.Worker("late", store=group.store)
    resumed: list[tuple[Any, ...]] = []
    handlers, barrier = leaving._worker.handlers, leaving._worker.shutdown
    submit, deferred, counts = handlers._submit, barrier._deferred, list[int]()
    monkeypatch.setattr(handlers, "_submit", lambda *job: resumed.append(job))

    def count_deferred() -> int:
        counts.append(deferred())
        return counts[-1]

    monkeypatch.setattr(barrier, "_deferred", count_deferred)
    results: list[Any] = []
    reference = rpc.remote("late", waits, (step.local, 7))
    reader = threading.Thread(target=lambda: results.append(reference.to_here()))
    reader.start()
    eventually(lambda: leaving.debug_info().counts.parked_requests == 1)
    shutdown = threading.Thread(target=leaving.shutdown)
    shutdown.start()
    step.go_on.set()
    eventually(lambda: resumed and not handlers.async_calls)
    checked = len(counts)
    eventually(lambda: len(counts) > checked + 2 or not shutdown.is_alive())
    assert shutdown.is_alive()
    submit(*resumed.pop())
    for thread in (reader, shutdown):
        thread.join(10)
        assert not thread.is_alive()
    assert results == [7]


def test_calls_to_a_worker_that_has_left(group: Cluster) -> None:
    info = rpc.Worker("late", store=group.store)
    worker_id = info.info.id
    info.shutdown()
    eventually(lambda: "late" not in [each.name for each in group[0]._worker.members.infos()])
    for to in ("late", worker_id):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(WorkerLost, match="worker late is lost: it left the group") as raised:
                call(to, abs, (-1,))
            assert raised.value.left
    with pytest.raises(WorkerLost, match="it left the group"):
        rpc.get_worker_info("late")


def test_a_retry_lasts_until_the_name_is_back(group: Cluster) -> None:
    rpc.Worker("late", store=group.store).shutdown()
    eventually(lambda: "late" not in [each.name for each in group[0]._worker.members.infos()])
    future = rpc.rpc_async("late", abs, (-3,), retry=SOON_AGAIN)
    back = rpc.Worker("late", store=group.store)
    assert future.wait() == 3
    back.shutdown()


def test_a_map_goes_on_without_workers_that_have_left(group: Cluster) -> None:
    first, second = (rpc.Worker(name, store=group.store) for name in ("first", "second"))
    assert list(rpc.map(["first", "second"], abs, [-1, -2])) == [1, 2]
    first.shutdown()
    eventually(lambda: "first" not in [each.name for each in group[0]._worker.members.infos()])
    with pytest.raises(WorkerLost, match="worker first is lost: it left the group"):
        list(rpc.map(["first", "second"], abs, [-1]))
    results = rpc.map(["first", "w1", "second"], abs, range(-1000, 0), chunk=5, retry=rpc.Retry())
    assert [next(results) for _ in range(100)] == list(range(1000, 900, -1))
    second.shutdown()
    assert list(results) == list(range(900, 0, -1))


def test_a_map_whose_workers_have_all_left(group: Cluster) -> None:
    rpc.Worker("late", store=group.store).shutdown()
    eventually(lambda: "late" not in [each.name for each in group[0]._worker.members.infos()])
    retry = rpc.Retry(attempts=3, backoff=0.001, max_backoff=0.001)
    with pytest.raises(WorkerLost, match="late is lost") as raised:
        list(rpc.map(["late"], abs, [-1, -2], retry=retry))
    assert any("rpc.map of abs" in note for note in raised.value.__notes__)
    results = rpc.map(["late"], abs, [-1, -2], retry=SOON_AGAIN)
    back = rpc.Worker("late", store=group.store)
    assert list(results) == [1, 2]
    back.shutdown()


async def items(step: Local[Step], count: int) -> AsyncIterator[int]:
    for item in range(count):
        while item and not step.value.go_on.is_set():
            await asyncio.sleep(0.001)
        yield item


def test_a_worker_that_leaves_waits_for_its_readers(group: Cluster) -> None:
    """Then its streams end with an error about itself."""
    step, leaving = Step(), rpc.Worker("late", store=group.store)
    stream = leaving.stream("w0", items, (step.local, 1000), prefetch=1)
    assert next(stream) == 0
    read: list[int] = []
    reader = threading.Thread(target=lambda: read.append(next(stream)))
    reader.start()
    eventually(lambda: Streams.of(leaving._worker)._waiting_readers() == 1)
    shutdown = threading.Thread(target=leaving.shutdown)
    shutdown.start()
    eventually(lambda: "late" not in [info.name for info in group[0]._worker.members.infos()])
    assert shutdown.is_alive()
    step.go_on.set()
    for thread in (reader, shutdown):
        thread.join(10)
        assert not thread.is_alive()
    assert read == [1]
    with pytest.raises(NotInitialized):
        list(stream)


def test_streams_without_a_reader_end_with_the_worker_that_reads(group: Cluster) -> None:
    """The error is not about the callee, which is alive."""
    step, leaving = Step(), rpc.Worker("late", store=group.store)
    stream = leaving.stream("w0", items, (step.local, 10))
    assert next(stream) == 0
    eventually(lambda: Streams.of(leaving._worker).receivers[1].idle_call() is not None)
    leaving.shutdown()
    with pytest.raises(NotInitialized):
        list(stream)


def test_a_reader_between_two_requests_counts(group: Cluster) -> None:
    leaving = rpc.Worker("late", store=group.store)
    leaving._worker.waiting_readers.append(lambda: 1)
    with pytest.raises(ShutdownTimeout):
        leaving.shutdown(timeout=0.1)


class EncodedSlowly:
    def __init__(self, step: Step) -> None:
        self._step = step

    def __reduce__(self) -> tuple[Any, ...]:
        self._step.begun.set()
        assert self._step.go_on.wait(10)
        return int, (7,)


async def gives_slowly(step: Local[Step]) -> object:
    return EncodedSlowly(step.value)


def test_a_worker_that_leaves_waits_until_a_deferred_result_is_sent(group: Cluster) -> None:
    step, leaving = Step(), rpc.Worker("late", store=group.store)
    future = rpc.rpc_async("late", gives_slowly, (step.local,))
    assert step.begun.wait(10)
    shutdown = threading.Thread(target=leaving.shutdown)
    shutdown.start()
    shutdown.join(0.3)
    assert shutdown.is_alive()
    step.go_on.set()
    assert future.wait() == 7
    shutdown.join(10)
    assert not shutdown.is_alive()

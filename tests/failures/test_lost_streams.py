"""Streams at the end of their session, without a request in progress."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import NotInitialized, StreamError, WorkerLost
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, Local, cluster, eventually


def numbers(ended: Local[threading.Event]) -> Iterator[int]:
    try:
        while True:
            yield 0
    finally:
        ended.value.set()


async def numbers_async(ended: Local[threading.Event]) -> AsyncIterator[int]:
    try:
        while True:
            yield 0
    finally:
        ended.value.set()


def all_items(stream: Any) -> list[int]:
    return list(stream)


def all_items_async(stream: Any) -> list[int]:
    async def read() -> list[int]:
        return [item async for item in stream]

    return asyncio.run(read())


def kill(group: Cluster) -> None:
    group[1].shutdown(graceful=False)
    eventually(lambda: 1 in group[0]._worker.members.lost)


def leave(group: Cluster) -> None:
    group[1].shutdown()
    eventually(lambda: 1 in group[0]._worker.members.lost)


def cut(group: Cluster) -> None:
    """End the session; the next message begins another one."""
    caller, callee = (worker._worker for worker in group)
    before = caller.references.epoch_of(1), callee.references.epoch_of(0)
    caller.engine.remove_peer(1, "the network is cut", callee.incarnation)
    member = caller.members.get(1)
    assert member is not None
    caller.on_peer_lost(1, callee.incarnation, "the network is cut", False)
    caller.add_member(member)
    eventually(lambda: callee.references.epoch_of(0) > before[1])
    assert caller.references.epoch_of(1) > before[0]


def replace(group: Cluster) -> None:
    """Add another process of the callee's name before the loss of the first one."""
    core = group[0]._worker
    member = core.members.get(1)
    assert member is not None
    core.add_member(member._replace(incarnation=member.incarnation + (1 << 32)))
    eventually(lambda: 1 not in core.members.connected)


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """Two workers, which both end a session with its connection."""
    with cluster(2, rpc.Options(resume=False), dynamic=True, graceful=False, check=False) as group:
        yield group


@pytest.mark.parametrize("end", [kill, leave, cut, replace])
@pytest.mark.parametrize("read", [all_items, all_items_async])
@pytest.mark.parametrize("function", [numbers, numbers_async])
def test_a_stream_after_the_end_of_its_session(
    pair: Cluster, function: Any, read: Callable[[Any], list[int]], end: Callable[[Cluster], None]
) -> None:
    ended, process = Local(threading.Event()), pair[1]._worker.incarnation
    stream = rpc.stream("w1", function, (ended,), prefetch=4)
    assert next(stream) == 0
    receiver: Any = Streams.of(pair[0]._worker).receivers[1]
    eventually(lambda: not receiver._is_pulling)
    end(pair)
    with pytest.raises(WorkerLost) as caught:
        read(stream)
    assert (caught.value.name, caught.value.incarnation) == ("w1", process)
    assert caught.value.why
    assert ended.value.wait(10)
    with pytest.raises(StreamError, match="ended with WorkerLost"):
        read(stream)
    assert not Streams.of(pair[0]._worker).receivers


def test_a_request_for_items_in_the_next_session(pair: Cluster) -> None:
    """The first item has arrived, but the loss was handled before its reply."""
    ended, process = Local(threading.Event()), pair[1]._worker.incarnation
    stream = rpc.stream("w1", numbers, (ended,), prefetch=4)
    assert next(stream) == 0
    receiver: Any = Streams.of(pair[0]._worker).receivers[1]
    eventually(lambda: not receiver._is_pulling)
    receiver._is_opening = True
    cut(pair)
    with pytest.raises(WorkerLost, match="it has closed the stream of numbers before its end") as caught:
        list(stream)
    assert caught.value.incarnation == process


def test_a_generator_that_exists_after_the_end_of_its_session(pair: Cluster) -> None:
    gate, closed = Gate(), Local(threading.Event())

    def late() -> Any:
        gate.enter()
        return SimpleIterator(closed.value)

    stream = rpc.stream("w1", late)
    gate.wait_for()
    cut(pair)
    gate.open()
    assert closed.value.wait(10)
    eventually(lambda: not Streams.of(pair[1]._worker).producers)
    with pytest.raises(WorkerLost):
        next(stream)


class SimpleIterator:
    """Iterator that notes its close."""

    def __init__(self, closed: threading.Event) -> None:
        self.close = closed.set

    def __next__(self) -> int:
        return 0


def test_the_stream_of_a_new_process_stays_when_one_of_its_predecessor_ends(pair: Cluster) -> None:
    """Both processes count their streams from 1."""
    streams = Streams.of(pair[1]._worker)
    old, new, late = (producer() for _ in range(3))
    streams.add(old, False)
    streams._on_session_end(0, SimpleNamespace(incarnation=1))  # type: ignore[arg-type]
    streams.add(new, False)
    streams.add(late, True)
    streams.remove(old)
    assert streams.producers == {(0, 1): new}
    assert old.closed.wait(10)
    assert not new.closed.is_set()
    streams.remove(new)


def producer() -> Any:
    closed = threading.Event()
    return SimpleNamespace(key=(0, 1), closed=closed, close=closed.set, current_run=lambda: None)


def test_a_stream_that_this_worker_has_closed_after_the_loss_of_its_callee(pair: Cluster) -> None:
    ended = Local(threading.Event())
    stream = rpc.stream("w1", numbers, (ended,), prefetch=4)
    assert next(stream) == 0
    receiver: Any = Streams.of(pair[0]._worker).receivers[1]
    eventually(lambda: not receiver._is_pulling)
    receivers = Streams.of(pair[0]._worker).receivers
    kill(pair)
    eventually(lambda: not receivers)
    receiver.stop(NotInitialized.closed())
    with pytest.raises(NotInitialized):
        list(stream)

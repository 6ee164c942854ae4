"""Streams: requests for items that the callee holds back, at unfavorable moments."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import MessageTooLarge, SerializationError
from telegrad.streams import producer
from telegrad.streams.producer import Producer
from telegrad.streams.receiver import Receiver
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, Local, cluster, eventually, faults

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


@pytest.fixture(autouse=True)
def full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete no batch because of its age."""
    monkeypatch.setattr(producer, "BATCH_TIME", 3600 * 10**9)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a stream whose reader asks for items late.

    Its second batch is then complete at the callee, and arrives after that.
    """
    asked, flush = threading.Event(), Producer.flush

    def flush_and_say(self: Producer) -> Any:
        batch = flush(self)
        asked.set()
        return batch

    monkeypatch.setattr(Producer, "flush", flush_and_say)

    def release() -> None:
        assert asked.wait(10)
        faults.release()

    releaser = threading.Thread(target=release)

    def open_stream(*args: Any, **kwargs: Any) -> Any:
        faults.add(faults.Rule("delay", "w1", "w0", "value", nth=2))
        stream = rpc.stream("w1", *args, **kwargs)
        eventually(lambda: stream._receiver._arrived == 1)  # a reader that waits for it gets a smaller second batch
        assert next(stream) == 0
        faults.wait(1)
        releaser.start()
        return stream

    with cluster(2, rpc.Options(faults=str(faults.Plan()))):
        yield open_stream
        releaser.join(10)


def test_the_error_of_an_item_is_not_lost(late: Callable[..., Any]) -> None:
    passed, ended = Local(list[bool]()), Local(threading.Event())

    def bad() -> Iterator[Any]:
        try:
            yield from range(5)
            yield threading.Lock()
            passed.value.append(True)
            yield 6
        finally:
            ended.value.set()

    stream = late(bad)
    assert [next(stream) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(SerializationError, match=r"item 5 of the stream of .*lock"):
        next(stream)
    assert ended.value.wait(10)
    assert not passed.value  # the error waits for no further step


@pytest.fixture
def small() -> Iterator[Cluster]:
    """Workers that send only small messages."""
    with cluster(2, rpc.Options(max_message_bytes=64 << 10)) as group:
        yield group


def test_items_that_a_failed_request_loses_end_the_stream(small: Cluster) -> None:
    """Each of the two items fits in a message, both do not."""
    gate = Gate()

    def waits() -> Iterator[Any]:
        yield 0
        yield torch.zeros(40 << 10, dtype=torch.uint8)
        yield torch.zeros(40 << 10, dtype=torch.uint8)
        gate.enter()
        while True:
            yield 3

    stream = rpc.stream("w1", waits)
    eventually(lambda: stream._receiver._arrived == 1)  # a reader that waits for it gets a smaller second batch
    assert next(stream) == 0
    gate.wait_for()

    def open_late() -> None:
        eventually(lambda: stream._receiver._flush_error is not None)
        gate.open()

    opener = threading.Thread(target=open_late)
    opener.start()
    with pytest.raises(MessageTooLarge):
        next(stream)
    opener.join(10)
    eventually(lambda: not Streams.of(small[1]._worker).producers)


# ---- requests that are handled before, or answered after, the batch that they are about


class Order:
    """Order of the two requests of a reader for its second batch.

    Attributes:
        asked: Set when the callee has handled the request for held items, before which the batch does not begin.
        answer: Set by the test to send the reply.
        holding: Set when the fourth batch holds an item back, see `answer_late`.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.holding = threading.Event()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    made = Order()
    pull, flush = Producer.pull, Producer.flush

    def late_pull(self: Producer, credit: int) -> Any:
        assert not self._next or made.asked.wait(10)
        return pull(self, credit)

    def flush_and_wait(self: Producer) -> Any:
        batch = flush(self)
        made.asked.set()
        assert made.answer.wait(10)
        return batch

    monkeypatch.setattr(Producer, "pull", late_pull)
    monkeypatch.setattr(Producer, "flush", flush_and_wait)
    return made


def waits_after(n: int, gate: Gate) -> Iterator[int]:
    yield from range(n)
    gate.enter()
    yield n


def read_first(n: int, gate: Gate) -> Any:
    stream = rpc.stream("w1", waits_after, (n, gate), prefetch=4, timeout=10)
    eventually(lambda: stream._receiver._arrived == 1)  # a reader that waits for it gets a smaller second batch
    assert next(stream) == 0
    return stream


def test_a_request_before_its_batch_begins_holds_nothing_back(order: Order) -> None:
    gate = Gate()
    order.answer.set()
    stream = read_first(2, gate)
    try:
        assert next(stream) == 1
    finally:
        gate.open()
    assert list(stream) == [2]


def answer_late(order: Order, gate: Gate, until: Callable[[], bool]) -> threading.Thread:
    """Answer once the fourth batch holds an item back and the condition is true."""

    def run() -> None:
        gate.wait_for()
        order.holding.set()
        eventually(until)
        order.answer.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_late_answer_holds_no_later_batch_back(order: Order) -> None:
    gate = Gate()
    stream = read_first(4, gate)
    thread = answer_late(order, gate, lambda: True)
    try:
        assert [next(stream) for _ in range(3)] == [1, 2, 3]
    finally:
        gate.open()
        thread.join(10)
    assert list(stream) == [4]


def test_a_task_asks_again_after_a_late_answer(order: Order) -> None:
    gate = Gate()
    stream = read_first(4, gate)

    async def read() -> list[int]:
        items = [await anext(stream)]
        await asyncio.to_thread(order.holding.wait, 10)
        return [*items, await anext(stream), await anext(stream)]

    thread = answer_late(order, gate, lambda: bool(stream._receiver._is_slow))
    try:
        assert asyncio.run(read()) == [1, 2, 3]
    finally:
        gate.open()
        thread.join(10)
    assert list(stream) == [4]


def test_items_that_arrive_before_their_reader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, flush = Gate(), Receiver.flush

    def flush_and_wait(self: Receiver) -> None:
        flush(self)
        eventually(lambda: self._flush is None)

    monkeypatch.setattr(Receiver, "flush", flush_and_wait)
    stream = read_first(2, gate)
    gate.wait_for()
    try:
        assert next(stream) == 1
    finally:
        gate.open()
    assert list(stream) == [2]

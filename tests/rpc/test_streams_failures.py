"""Streams: errors, timeouts, and wrong uses."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RemoteError, RpcTimeout, SerializationError, StreamError, UnknownWorker, WorkerLost
from telegrad.options import Options
from telegrad.testing import Gate, Local, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


def fails(after: int) -> Iterator[int]:
    yield from range(after)
    raise KeyError("in a generator")


async def fails_async(after: int) -> AsyncIterator[int]:
    for i in range(after):
        yield i
    raise KeyError("in a generator")


def collect(stream: Any) -> tuple[list[Any], Exception]:
    """Return the items before an error, and the error."""
    items = []
    try:
        for item in stream:
            items.append(item)
    except Exception as e:
        return items, e
    raise AssertionError(f"the stream ended after {items}")


@pytest.mark.parametrize("function", [fails, fails_async])
@pytest.mark.parametrize("after", [0, 1, 5, 1000])
def test_an_error_comes_after_the_items_before_it(function: Any, after: int) -> None:
    stream = rpc.stream("w1", function, (after,))
    items, error = collect(stream)
    assert items == list(range(after))
    assert isinstance(error, KeyError)
    assert isinstance(error, RemoteError)
    assert error.worker == "w1"
    assert "in fails" in error.remote_traceback
    assert f"after {after} items" in error.__notes__[0]
    for again in (next, list):  # it does not look complete
        with pytest.raises(StreamError, match=f"ended with KeyError after {after} items"):
            again(stream)


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("before", [0, 1, 100])
def test_an_item_that_cannot_be_sent(before: int) -> None:
    ended = Local(threading.Event())

    def bad() -> Iterator[Any]:
        try:
            yield from range(before)
            yield Unpicklable()
            yield 0
        finally:
            ended.value.set()

    async def bad_async() -> AsyncIterator[Any]:
        try:
            for i in range(before):
                yield i
            yield Unpicklable()
            yield 0
        finally:
            ended.value.set()

    for function in (bad, bad_async):
        items, error = collect(rpc.stream("w1", function))
        assert items == list(range(before))
        assert isinstance(error, SerializationError)
        assert f"item {before} of the stream of" in str(error)
        assert "lock" in str(error)
        assert ended.value.wait(10)
        ended.value.clear()


def explode() -> None:
    raise ZeroDivisionError("while arriving")


class ExplodesOnArrival:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def test_an_item_that_cannot_be_received() -> None:
    def bad() -> Iterator[Any]:
        yield 0
        yield ExplodesOnArrival()
        yield 1

    items, error = collect(rpc.stream("w1", bad))
    assert items == [0]
    assert isinstance(error, ZeroDivisionError)


def test_functions_that_return_no_iterator() -> None:
    async def coroutine() -> int:
        return 1

    for function, match in (
        (lambda: [1, 2], "a list, not an iterator"),
        (coroutine, "a coroutine, not an iterator"),
        (lambda: 1, "an int, not"),
    ):
        with pytest.raises(TypeError, match=f"on worker w1 returned {match}"):
            next(rpc.stream("w1", function))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional argument"):
        next(rpc.stream("w1", numbers))
    with pytest.raises(TypeError, match="callable"):
        rpc.stream("w1", 7)  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    with pytest.raises(UnknownWorker):
        rpc.stream("w9", numbers, (1,))
    for prefetch in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"at least 1, and not {prefetch}"):
            rpc.stream("w1", numbers, (1,), prefetch=prefetch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="args has to be a tuple"):
        rpc.stream("w1", numbers, 1)  # type: ignore[arg-type]
    with pytest.raises(SerializationError):
        rpc.stream("w1", numbers, (threading.Lock(),))


def stop() -> None:
    raise StopIteration


def test_stop_iteration_of_the_function_is_no_end() -> None:
    with pytest.raises(RuntimeError, match=r"raised .*StopIteration"):
        next(rpc.stream("w1", stop))  # type: ignore[arg-type]


# ---- wrong uses


def test_a_stream_is_read_once() -> None:
    stream = rpc.stream("w1", numbers, (3,))
    assert next(stream) == 0
    assert list(stream) == [1, 2]  # the rest, in a first loop
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(StreamError, match="the stream of numbers on w1 was read to its end"):
        list(stream)

    async def again() -> None:
        async for _ in stream:
            pass

    with pytest.raises(StreamError, match="can be read only once"):
        asyncio.run(again())


def test_a_closed_stream() -> None:
    stream = rpc.stream("w1", numbers, (3,))
    assert next(stream) == 0
    stream.close()
    with pytest.raises(StreamError, match="was closed after"):
        next(stream)
    with pytest.raises(StreamError, match="was closed after 1 items, and can be read only once"):
        list(stream)
    assert "closed" in repr(stream)


def waits(gate: Gate) -> Iterator[int]:
    gate.enter()
    yield 1


def test_two_threads_at_once() -> None:
    gate = Gate()
    stream = rpc.stream("w1", waits, (gate,))
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(stream))
    thread.start()
    eventually(lambda: stream._receiver._reader is not None)
    with pytest.raises(StreamError, match="waits on w1 is read by two threads"):
        next(stream)
    gate.open()
    thread.join(10)
    assert got == [1]


def test_two_tasks_at_once() -> None:
    async def read() -> None:
        gate = Gate()
        stream = rpc.stream("w1", waits, (gate,))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(StreamError, match="two threads or tasks"):
            await anext(stream)
        gate.open()
        assert await first == 1

    asyncio.run(read())


def test_close_from_another_thread_ends_the_wait() -> None:
    gate = Gate()
    stream = rpc.stream("w1", waits, (gate,))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            next(stream)
        except StreamError as e:
            errors.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: stream._receiver._reader is not None)
    stream.close()
    gate.open()
    thread.join(10)
    assert "was closed after 0 items" in str(errors[0])


# ---- timeouts


def test_the_timeout_limits_each_wait() -> None:
    gate = Gate()

    def slow() -> Iterator[int]:
        yield 0
        gate.enter()
        yield 1

    with pytest.raises(RpcTimeout, match=r"item 1 of the stream of .*slow on w1; running") as caught:
        list(rpc.stream("w1", slow, timeout=0.05))
    assert caught.value.state == "running"

    async def read() -> None:
        async for _ in rpc.stream("w1", slow, timeout=0.05):
            pass

    with pytest.raises(RpcTimeout, match="item 1 of the stream") as caught:
        asyncio.run(read())
    assert caught.value.state == "running"
    gate.open()


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


@pytest.mark.parametrize("intercepted", [False, True])
def test_the_state_of_a_stream_that_no_thread_of_the_callee_has_opened(intercepted: bool) -> None:
    gate = Gate()
    with cluster(2, Options(num_worker_threads=1)), rpc.intercept(client=through) if intercepted else nullcontext():
        held = rpc.rpc_async("w1", gate.enter)
        gate.wait_for()
        with pytest.raises(RpcTimeout) as caught:
            next(rpc.stream("w1", numbers, (3,), timeout=0.05))
        assert caught.value.state == "queued"
        gate.open()
        held.wait()


def test_a_wait_ends_at_its_timeout() -> None:
    """A wait has two steps, for a call and for the arrival of items, and one timeout."""
    gate = Gate()
    with rpc.stream("w1", waits, (gate,), timeout=0.5) as items:
        begin = time.monotonic()
        with pytest.raises(RpcTimeout):
            next(items)
        assert time.monotonic() - begin < 0.95
    gate.open()


class Held:
    """An item that blocks the thread that decodes it."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[Any, ...]:
        return Gate.enter, (self.gate,)


def holds(gate: Gate, closed: Local[threading.Event]) -> Iterator[object]:
    try:
        yield 0
        while True:
            yield Held(gate)
    finally:
        closed.value.set()


def test_a_timeout_while_a_batch_is_decoded_closes_the_generator() -> None:
    gate, closed = Gate(), Local(threading.Event())

    async def read() -> None:
        stream = rpc.stream("w1", holds, (gate, closed), timeout=0.2, prefetch=1)
        assert await anext(stream) == 0
        with pytest.raises(RpcTimeout, match="item 1 of the stream"):
            await anext(stream)

    asyncio.run(read())
    gate.wait_for()
    gate.open()
    assert closed.value.wait(10)


def reads(gate: Gate) -> list[int]:
    return list(rpc.stream("w0", waits, (gate,), timeout=0))


def test_the_deadline_of_the_readers_request_applies() -> None:
    gate = Gate()
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", reads, (gate,), timeout=0.1)
    eventually(lambda: rpc.rpc_sync("w1", max, (1, 2)) == 2)
    gate.open()


def test_a_coroutine_must_not_block_the_loop() -> None:
    gate = Gate()

    async def blocks(gate: Gate) -> list[int]:
        return list(rpc.stream("w0", waits, (gate,)))

    with pytest.raises(RuntimeError, match="reading a stream would block the event loop"):
        rpc.rpc_sync("w1", blocks, (gate,))
    gate.open()

    async def awaits() -> list[int]:
        return [item async for item in rpc.stream("w0", numbers, (3,))]

    assert rpc.rpc_sync("w1", awaits) == [0, 1, 2]


# ---- losses


def test_a_lost_callee() -> None:
    gate = Gate()

    def waiting() -> Iterator[int]:
        yield from range(3)
        gate.enter()

    with cluster(2, graceful=False) as group:
        stream = rpc.stream("w1", waiting)
        assert next(stream) == 0
        gate.wait_for()
        lost = threading.Thread(target=group[1].shutdown, kwargs={"graceful": False})
        lost.start()
        items, error = collect(stream)
        gate.open()  # earlier, the generator might end before its worker
        lost.join(10)
        assert isinstance(error, WorkerLost)
        assert items == [1, 2][: len(items)]


def test_errors_of_closing_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def bad() -> Iterator[int]:
        try:
            yield 0
            yield 1
        finally:
            raise KeyError("while closing")

    caplog.set_level(logging.DEBUG, "telegrad.remote")
    with rpc.stream("w1", bad, prefetch=1) as stream:
        assert next(stream) == 0
    eventually(lambda: "while closing" in caplog.text)
    assert "closing the stream of" in caplog.text


class Corpus:
    def numbers(self) -> Iterator[int]:
        yield 0

    async def numbers_async(self) -> AsyncIterator[int]:
        yield 0


@pytest.mark.parametrize("name", ["numbers", "numbers_async"])
def test_a_call_of_a_generator_function_names_rpc_stream(name: str) -> None:
    with pytest.raises(SerializationError, match=r"generator' object.*rpc\.stream") as raised:
        rpc.rpc_sync("w1", getattr(Corpus(), name))
    assert isinstance(raised.value, RemoteError)
    owned = rpc.remote("w1", Corpus)
    with pytest.raises(SerializationError, match=r"rpc\.stream"):
        getattr(owned.rpc_sync(), name)()
    with pytest.raises(SerializationError, match=r"rpc\.stream"):
        rpc.rpc_sync("w1", len, (getattr(Corpus(), name)(),))


def freed_item() -> Iterator[Any]:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    yield 1
    yield [tensor]


def test_an_item_without_its_memory_is_refused() -> None:
    items = rpc.stream("w1", freed_item)
    with pytest.raises(SerializationError, match="its storage has 0 of 12 bytes"):
        list(items)


def opens() -> Any:
    return rpc.stream("w0", numbers, (3,))


def passes_on() -> Iterator[int]:
    yield from rpc.stream("w0", numbers, (3,))


def test_a_stream_cannot_be_sent() -> None:
    text = r"cannot send the stream of numbers on w{}: only the worker that has opened .* Send list\(stream\)"
    with rpc.stream("w1", numbers, (3,)) as items:
        with pytest.raises(SerializationError, match=text.format(1) + r".* \(at args\[0\], of type [\w.]*Stream\)"):
            rpc.rpc_sync("w1", list, (items,))
        assert list(items) == [0, 1, 2]
    with pytest.raises(SerializationError, match=text.format(0)):
        rpc.rpc_sync("w1", opens)
    assert list(rpc.stream("w1", passes_on)) == [0, 1, 2]

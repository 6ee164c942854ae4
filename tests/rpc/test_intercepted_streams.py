"""Streams and chunks of `rpc.map` as interceptors see them."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import RemoteError, TelegradError
from telegrad.testing import Cluster, Local, eventually

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


async def numbers_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


def squares(n: int) -> Iterator[int]:
    yield from (i * i for i in range(n))


def add_one(x: int) -> int:
    return x + 1


async def add_one_later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


class Corpus:
    def lines(self, n: int) -> Iterator[str]:
        yield from (f"line {i}" for i in range(n))

    def words(self, n: int) -> Iterator[str]:
        yield from (f"word {i}" for i in range(n))


class Seen(list[Any]):
    """Interceptor that notes calls."""

    def __call__(self, call: rpc.InterceptedCall, proceed: rpc.Proceed, /) -> object:
        self.append(call)
        return proceed(call)

    def facts(self) -> list[Any]:
        return [(call.kind, call.name, call.args, dict(call.kwargs)) for call in self]


def changed(**changes: Any) -> Any:
    return lambda call, proceed: proceed(dataclasses.replace(call, **changes))


SIDES = pytest.mark.parametrize("side", ["client", "server"])


@pytest.fixture
def intercept(two: Cluster) -> Iterator[Any]:
    registrations = []

    def register(side: str, interceptor: Any) -> None:
        with two[0] if side == "client" else two[1]:
            registrations.append(rpc.intercept(**{side: interceptor}))

    yield register
    for registration in registrations:
        registration.remove()


# ---- streams


@SIDES
@pytest.mark.parametrize("function", [numbers, numbers_async])
def test_a_stream_is_one_call_of_its_function(intercept: Any, side: str, function: Any) -> None:
    seen = Seen()
    intercept(side, seen)
    assert list(rpc.stream("w1", function, (1000,))) == list(range(1000))
    assert list(rpc.stream("w1", function, kwargs={"n": 2})) == [0, 1]
    with rpc.stream("w1", function, (100_000,), prefetch=1) as stream:
        assert next(stream) == 0
    name = function.__name__
    assert seen.facts() == [
        ("stream", name, (1000,), {}), ("stream", name, (), {"n": 2}), ("stream", name, (100_000,), {}),
    ]  # fmt: skip
    assert [call.function for call in seen] == [function] * 3


@SIDES
def test_functions_by_value(intercept: Any, side: str) -> None:
    seen = Seen()
    intercept(side, seen)
    assert list(rpc.stream("w1", lambda n: iter(range(n)), (3,))) == [0, 1, 2]
    assert list(rpc.map("w1", lambda x: x + 1, range(3), chunk=3)) == [1, 2, 3]
    assert [(kind, args) for kind, _, args, _ in seen.facts()] == [("stream", (3,)), ("map", ([0, 1, 2],))]
    assert all(callable(call.function) for call in seen)


@SIDES
def test_streams_of_methods(intercept: Any, side: str) -> None:
    owned = rpc.remote("w1", Corpus)
    owned.to_here()
    seen = Seen()
    intercept(side, seen)
    assert list(owned.stream().lines(2)) == ["line 0", "line 1"]
    name = "lines" if side == "client" else "Corpus.lines"
    assert seen.facts() == [("stream", name, (2,), {})]
    assert seen[0].receiver is (owned if side == "client" else None)
    seen.clear()


@SIDES
def test_function_and_arguments_of_a_stream_may_be_changed(intercept: Any, side: str) -> None:
    intercept(side, changed(function=squares, args=(4,)))
    assert list(rpc.stream("w1", numbers, (2,))) == [0, 1, 4, 9]


def test_the_method_of_a_stream_may_be_changed(intercept: Any) -> None:
    owned = rpc.remote("w1", Corpus)
    owned.to_here()
    with rpc.intercept(client=changed(function="words", args=(1,))):
        assert list(owned.stream().lines(2)) == ["word 0"]
    with rpc.intercept(client=changed(function=squares)), pytest.raises(ValueError, match="name of another method"):
        owned.stream().lines(2)
    intercept("server", changed(function=squares))
    assert list(owned.stream().lines(3)) == [0, 1, 4]


@SIDES
@pytest.mark.parametrize("function", [numbers, numbers_async])
def test_an_interceptor_denies_a_stream(intercept: Any, side: str, function: Any) -> None:
    def deny(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        if call.name == function.__name__:
            raise PermissionError(f"{call.name} is not for {call.peer}")
        return proceed(call)

    intercept(side, deny)
    with pytest.raises(PermissionError, match=f"{function.__name__} is not for w") as raised:
        list(rpc.stream("w1", function, (3,)))
    assert isinstance(raised.value, RemoteError) is (side == "server")
    with pytest.raises(PermissionError):
        list(rpc.map("w1", function, range(3)))


@SIDES
@pytest.mark.parametrize("function", [numbers, numbers_async])
def test_the_future_of_a_stream_is_done_with_its_first_batch(intercept: Any, side: str, function: Any) -> None:
    done = threading.Event()

    def note(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        future = proceed(call)
        future.add_done_callback(lambda _: done.set())
        return future.then(lambda first: first.value())

    intercept(side, note)
    with rpc.stream("w1", function, (100_000,)) as stream:
        assert next(stream) == 0
        assert done.is_set()


@SIDES
@pytest.mark.parametrize("how", ["value", "future", "derived"])
def test_the_result_of_a_stream_or_a_chunk_cannot_be_replaced(intercept: Any, side: str, how: str) -> None:
    def replace(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        if how == "value":
            return [1, 2]
        if how == "derived":
            return proceed(call).then(lambda _: [1, 2])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([1, 2])
        return future

    intercept(side, replace)
    for function in (numbers, numbers_async):
        with pytest.raises(TelegradError, match=f"replaced the result of {function.__name__}, a call of kind 'stream'"):
            list(rpc.stream("w1", function, (3,)))
    for function in (add_one, add_one_later):
        with pytest.raises(TelegradError, match=f"replaced the result of {function.__name__}, a call of kind 'map'"):
            list(rpc.map("w1", function, range(3)))


@SIDES
def test_a_stream_within_interceptors_is_closed(intercept: Any, side: str) -> None:
    ended = threading.Event()
    said = Local(ended)

    def waits(said: Local[threading.Event]) -> Iterator[int]:
        yield 0
        eventually(rpc.cancelled)
        said.value.set()

    intercept(side, Seen())
    with rpc.stream("w1", waits, (said,)) as stream:
        assert next(stream) == 0
    assert ended.wait(10)


@SIDES
def test_a_stream_in_an_autograd_context(intercept: Any, side: str) -> None:
    def scaled(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
        for i in range(1, n + 1):
            yield x * i

    intercept(side, Seen())
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = torch.stack([y.sum() for y in rpc.stream("w1", scaled, (weight, 4))]).sum()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[weight], torch.full((3,), 10.0))


# ---- chunks


@SIDES
@pytest.mark.parametrize("function", [add_one, add_one_later])
def test_a_chunk_is_one_call_of_its_function(intercept: Any, side: str, function: Any) -> None:
    seen = Seen()
    intercept(side, seen)
    assert list(rpc.map("w1", function, range(4), chunk=2)) == [1, 2, 3, 4]
    assert sorted(seen.facts()) == [("map", function.__name__, (part,), {}) for part in ([0, 1], [2, 3])]
    assert [call.function for call in seen] == [function] * 2


@SIDES
@pytest.mark.parametrize("function", [add_one, add_one_later])
def test_function_and_items_of_a_chunk_may_be_changed(intercept: Any, side: str, function: Any) -> None:
    intercept(side, lambda call, proceed: proceed(dataclasses.replace(call, args=([-x for x in call.args[0]],))))
    assert list(rpc.map("w1", function, range(3), chunk=3)) == [1, 0, -1]
    intercept(side, changed(function=abs))
    assert list(rpc.map("w1", function, range(3), chunk=3)) == [0, 1, 2]


@SIDES
@pytest.mark.parametrize("changes", [{"args": (1, 2)}, {"args": (3,)}, {"kwargs": {"x": 1}}])
def test_a_chunk_keeps_its_list_of_items(intercept: Any, side: str, changes: Any) -> None:
    intercept(side, changed(**changes))
    with pytest.raises(ValueError, match="arguments of a chunk"):
        list(rpc.map("w1", add_one, range(3)))

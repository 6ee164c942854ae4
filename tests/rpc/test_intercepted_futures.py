"""Futures of torch as results, and errors of handlers that pass through `then`."""

import asyncio
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RemoteError
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster

pytestmark = pytest.mark.usefixtures("no_interceptors_left", "clean", "quiet")


def add(x: int) -> int:
    return x + 1


def value_of(done: Any) -> Any:
    return done.value()


@async_execution
def after_torch_future(x: int) -> Any:
    future: torch.futures.Future[int] = torch.futures.Future()
    result = future.then(lambda done: done.value() + 1)
    rpc.rpc_async("w0", add, (x - 1,)).add_done_callback(lambda done: future.set_result(done.value()))
    return result


@async_execution
def after_all(x: int) -> Any:
    return torch.futures.collect_all([rpc.rpc_async("w0", add, (x,))]).then(lambda done: done.value()[0].value())


def fail(text: str) -> None:
    raise KeyError(text)


async def fail_later(text: str) -> None:
    await asyncio.sleep(0)
    raise KeyError(text)


@async_execution
def fail_by_future(text: str) -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_exception(KeyError(text))
    return future


@async_execution
def fail_by_late_future(text: str) -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    rpc.rpc_async("w0", add, (1,)).add_done_callback(lambda _: future.set_exception(KeyError(text)))
    return future


FUNCTIONS = pytest.mark.parametrize("function", [after_torch_future, after_all], ids=["future.then", "collect_all"])


@FUNCTIONS
def test_torch_futures_within_server_interceptors(two: Cluster, function: Any) -> None:
    with two[1], rpc.intercept(server=lambda call, proceed: proceed(call)), two[0]:
        assert rpc.rpc_sync("w1", function, (1,)) == 2
        assert rpc.remote("w1", function, (1,)).to_here() == 2
        assert list(rpc.map("w1", function, [1, 2])) == [2, 3]


@FUNCTIONS
def test_torch_futures_of_server_interceptors(two: Cluster, function: Any) -> None:
    with two[1], rpc.intercept(server=lambda call, _: function(call.args[0])), two[0]:
        assert rpc.rpc_sync("w1", add, (1,)) == 2


@FUNCTIONS
def test_torch_futures_of_calls_that_may_be_repeated(function: Any) -> None:
    assert rpc.rpc_sync("w1", function, (1,), retry=rpc.Retry()) == 2


@FUNCTIONS
def test_torch_futures_in_a_map(function: Any) -> None:
    assert list(rpc.map("w1", function, range(10), chunk=4)) == list(range(1, 11))


def test_torch_futures_of_client_interceptors() -> None:
    def collect(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return torch.futures.collect_all([proceed(call)]).then(lambda done: done.value()[0].value() + 1)

    with rpc.intercept(client=collect):
        assert rpc.rpc_sync("w1", add, (1,)) == 3
        assert rpc.rpc_async("w1", add, (1,)).wait() == 3
        with rpc.intercept(client=collect):
            assert rpc.rpc_sync("w1", add, (1,)) == 4


@pytest.mark.parametrize("function", [fail, fail_later, fail_by_future, fail_by_late_future])
@pytest.mark.parametrize("depth", [1, 2])
def test_errors_of_handlers_keep_their_type_through_then(two: Cluster, function: Any, depth: int) -> None:
    def pass_on(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        future: Any = proceed(call)
        for _ in range(depth):
            future = future.then(value_of)
        return future

    with two[1], rpc.intercept(server=pass_on), two[0], pytest.raises(KeyError, match="oops") as caught:
        rpc.rpc_sync("w1", function, ("oops",))
    assert isinstance(caught.value, RemoteError)
    if function in (fail, fail_later):
        assert f"in {function.__name__}" in str(caught.value.__cause__)


def test_errors_of_callbacks_are_those_of_torch(two: Cluster) -> None:
    def refuse(_: object) -> object:
        raise KeyError("other")

    with two[1], rpc.intercept(server=lambda call, proceed: proceed(call).then(refuse)), two[0]:
        for function in (add, fail):
            with pytest.raises(RuntimeError, match="running the callback: KeyError: 'other'") as caught:
                rpc.rpc_sync("w1", function, (1,))
            assert not isinstance(caught.value, KeyError)

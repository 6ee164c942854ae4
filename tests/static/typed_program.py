"""Program that mypy and pyright check in test_typing.py; never run.

A line that must be an error has a ``type: ignore``. Both checkers report unused ones.
"""

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, assert_type

import torch
from torch.futures import Future

import telegrad
from telegrad import nn, rpc
from telegrad.rpc import CallFuture


class Model(torch.nn.Module):
    """Module of a program, used in calls and references."""

    untyped: list[Any]

    @staticmethod
    def load(path: str) -> "Model":
        raise NotImplementedError

    @classmethod
    def made(cls, size: int) -> "Model":
        raise NotImplementedError

    def loss(self, x: torch.Tensor) -> float:
        raise NotImplementedError


def plain(x: int, y: int = 0) -> str:
    raise NotImplementedError


def nothing() -> None:
    raise NotImplementedError


def maybe() -> int | None:
    raise NotImplementedError


def anything() -> Any:
    raise NotImplementedError


async def later(x: int) -> bytes:
    raise NotImplementedError


@rpc.functions.async_execution
def later_still(x: int) -> Future[float]:
    raise NotImplementedError


@rpc.functions.async_execution
def passed_on(x: int) -> CallFuture[float]:
    return rpc.rpc_async("w2", float, (x,))


def sync(model: Model) -> None:
    assert_type(rpc.rpc_sync("w1", plain, (1,)), str)
    assert_type(rpc.rpc_sync(0, plain, [1], {"y": 2}, timeout=3), str)
    assert_type(rpc.rpc_sync(rpc.get_worker_info("w1"), maybe), int | None)
    assert_type(rpc.rpc_sync("w1", anything), Any)
    assert_type(rpc.rpc_sync("w1", later, (1,)), bytes)
    assert_type(rpc.rpc_sync("w1", later_still, (1,)), float)
    assert_type(rpc.rpc_sync("w1", passed_on, (1,)), float)
    assert_type(rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)), torch.Tensor)
    assert_type(rpc.rpc_sync("w1", torch.zeros, (3,)), torch.Tensor)
    assert_type(rpc.rpc_sync("w1", Model.load, ("x",)), Model)
    assert_type(rpc.rpc_sync("w1", Model.made, (1,)), Model)
    assert_type(rpc.rpc_sync("w1", model.loss, (torch.ones(1),)), float)
    assert_type(rpc.rpc_sync("w1", lambda: 3), int)
    assert_type(telegrad.rpc.rpc_sync("w1", plain), str)


def asynchronous() -> None:
    assert_type(rpc.rpc_async("w1", plain, (1,)), CallFuture[str])
    assert_type(rpc.rpc_async("w1", plain).wait(), str)
    assert_type(rpc.rpc_async("w1", plain).value(), str)
    assert_type(rpc.rpc_async("w1", nothing), CallFuture[None])
    assert_type(rpc.rpc_async("w1", later), CallFuture[bytes])
    assert_type(rpc.rpc_async("w1", passed_on), CallFuture[float])
    assert_type(rpc.rpc_async("w1", plain).then(lambda done: len(done.value())), CallFuture[int])
    assert_type(rpc.rpc_async("w1", plain).then(lambda done: len(done.value())).wait(), int)
    torch_s: Future[str] = rpc.rpc_async("w1", plain)
    assert_type(rpc.wait_all([torch_s, rpc.rpc_async("w1", plain)]), list[str])
    assert_type(rpc.wait_all([rpc.rpc_async("w1", plain)]), list[str])
    assert_type(rpc.multicast(range(1, 4), plain, (1,)), list[CallFuture[str]])
    assert_type(rpc.multicast(["w1", 2], later), list[CallFuture[bytes]])
    assert_type(rpc.wait_all(rpc.multicast(range(1, 4), plain)), list[str])


def numbers(n: int) -> Iterator[int]:
    raise NotImplementedError


async def texts(n: int) -> AsyncIterator[str]:
    yield ""


def words(n: int) -> Iterable[str]:
    yield ""


def streams(worker: rpc.Worker, model: Model) -> None:
    assert_type(rpc.stream("w1", numbers, (3,)), rpc.Stream[int])
    assert_type(rpc.stream("w1", texts, (3,), timeout=1, prefetch=2), rpc.Stream[str])
    assert_type(rpc.stream("w1", functools.partial(numbers, 3)), rpc.Stream[int])
    assert_type(rpc.stream("w1", lambda: iter("abc")), rpc.Stream[str])
    assert_type(rpc.stream("w1", itertools.count, (3,)), rpc.Stream[int])
    assert_type(worker.stream("w1", numbers, (3,)), rpc.Stream[int])
    for item in rpc.stream("w1", anything):
        assert_type(item, Any)
    for item in model.untyped:
        rpc.stream("w1", item)
    assert_type(rpc.stream("w1", words, (3,)), rpc.Stream[str])
    rpc.stream("w1", nothing)  # type: ignore[arg-type]
    rpc.stream("w1", later, (3,))  # type: ignore[arg-type]
    worker.stream("w1", nothing)  # type: ignore[arg-type]


async def awaited() -> None:
    assert_type(await rpc.call("w1", plain, (1,)), str)
    assert_type(await rpc.call("w1", nothing), None)
    assert_type(await rpc.call("w1", later), bytes)
    assert_type(await rpc.call("w1", passed_on), float)
    assert_type(await rpc.rpc_async("w1", plain), str)
    assert_type(await rpc.remote("w1", Model), Model)


def references() -> None:
    model = rpc.remote("w1", Model)
    assert_type(model, rpc.RRef[Model])
    assert_type(model.to_here(), Model)
    assert_type(model.local_value(), Model)
    assert_type(rpc.RRef(3), rpc.RRef[int])
    assert_type(rpc.RRef([1]).local_value(), list[int])
    assert_type(rpc.remote("w1", plain, timeout=5), rpc.RRef[str])
    assert_type(rpc.remote("w1", later), rpc.RRef[bytes])
    assert_type(rpc.remote("w1", passed_on), rpc.RRef[float])
    assert_type(model.rpc_sync().loss, Callable[..., Any])
    assert_type(model.rpc_async(timeout=3).loss(1), CallFuture[Any])
    assert_type(model.call().loss, Callable[..., Coroutine[Any, Any, Any]])
    assert_type(model.remote().loss(1), rpc.RRef[Any])


async def workers(worker: rpc.Worker) -> None:
    assert_type(worker.rpc_sync("w1", plain), str)
    assert_type(worker.rpc_sync("w1", later), bytes)
    assert_type(worker.rpc_async("w1", plain), CallFuture[str])
    assert_type(worker.rpc_async("w1", passed_on), CallFuture[float])
    assert_type(await worker.call("w1", plain), str)
    assert_type(await worker.call("w1", later), bytes)
    assert_type(worker.multicast([1], plain), list[CallFuture[str]])
    assert_type(worker.multicast([1], later), list[CallFuture[bytes]])
    assert_type(worker.remote("w1", Model), rpc.RRef[Model])
    assert_type(worker.remote("w1", later), rpc.RRef[bytes])
    assert_type(worker.rref(3), rpc.RRef[int])


def modules() -> None:
    module = nn.RemoteModule("w1/cpu", Model, (1,))
    assert_type(module.forward_async(1), CallFuture[Any])
    assert_type(module.get_module_rref(), rpc.RRef[torch.nn.Module])
    assert_type(module.remote_parameters(), list[rpc.RRef[torch.nn.Parameter]])


async def wrong(x: torch.Tensor) -> None:
    number: int = rpc.rpc_sync("w1", plain)  # type: ignore[assignment]
    number = await rpc.call("w1", plain)  # type: ignore[arg-type]
    number = rpc.rpc_async("w1", plain).wait()  # type: ignore[assignment]
    number = rpc.remote("w1", plain).to_here()  # type: ignore[assignment]
    del number
    rpc.rpc_sync("w1", 3)  # type: ignore[call-overload]
    rpc.rpc_sync("w1", torch.neg, args=(x))  # type: ignore[call-overload]
    rpc.rpc_sync("w1", torch.neg, args=x)  # type: ignore[call-overload]
    rpc.rpc_async("w1", plain, (1,), timeout=None)  # type: ignore[call-overload]
    rpc.rpc_sync(None, plain)  # type: ignore[call-overload]
    rpc.rpc_sync("w1", plain).no_such_method()  # type: ignore[attr-defined]
    telegrad.no_such_module  # type: ignore[attr-defined]  # noqa: B018

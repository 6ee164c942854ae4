"""Calls of `forward` of a remote module: futures, coroutines, references, streams."""

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.nn import RemoteModule, owner
from telegrad.nn.module_method import needs_moves
from telegrad.rpc import RRef

pytestmark = pytest.mark.usefixtures("clean")

X = torch.arange(6.0).reshape(2, 3)


class Rows(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Iterator[Tensor]:
        for row in x:
            yield row * scale


class AsyncRows(nn.Module):
    async def forward(self, x: Tensor, *, scale: float = 1.0) -> AsyncIterator[Tensor]:
        for row in x:
            yield row * scale


class Mine(RemoteModule):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + 1
        return result


def expected(scale: float = 1.0) -> list[list[float]]:
    return [(row * scale).tolist() for row in X]


async def read(module: RemoteModule) -> list[Any]:
    return [item.tolist() async for item in module.forward.stream(X)]


@pytest.mark.parametrize("kind", [Rows, AsyncRows])
@pytest.mark.parametrize("place", ["w0", "w1"])
def test_a_generator_is_streamed(kind: type[nn.Module], place: str) -> None:
    module = RemoteModule(place, kind)
    assert [item.tolist() for item in module.forward.stream(X, scale=3.0)] == expected(3.0)
    assert asyncio.run(read(module)) == expected()
    assert rpc.rpc_sync("w2", read, (module,)) == expected()


def test_the_error_of_a_call_names_the_stream() -> None:
    module = RemoteModule("w1", Rows)
    with pytest.raises(SerializationError, match=r"type generator: .*module\.forward\.stream"):
        module(X)
    with pytest.raises(TypeError, match="returned a Tensor, not an iterator"):
        next(RemoteModule("w1", nn.Linear, (3, 1)).forward.stream(X))


async def await_forward(module: RemoteModule) -> list[Any]:
    made = module.forward.remote(X)
    return [await module.forward.call(X), await module.forward.rpc_async(X), await made]


def doubling(module: RRef[nn.Module]) -> None:
    module.local_value().register_forward_hook(lambda module, args, result: result * 2)


def test_other_calls_run_the_module_with_its_hooks() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 1))
    rpc.rpc_sync("w1", doubling, (module.module_rref,))
    y = module(X).detach()
    assert torch.equal(module.forward(X), y)
    for results in (asyncio.run(await_forward(module)), rpc.rpc_sync("w2", await_forward, (module,))):
        assert all(torch.equal(result, y) for result in results)
    made = module.forward.remote(X)
    assert made.owner_name() == "w1"
    del made, results


def test_it_is_like_a_bound_method() -> None:
    module = RemoteModule("w1", nn.Linear, (3, 1))
    assert (module.forward.__name__, module.forward.__qualname__) == ("forward", "RemoteModule.forward")
    assert module.forward.__self__ is module
    assert module.forward == module.forward
    assert module.forward != RemoteModule("w1", nn.Linear, (3, 1)).forward
    assert hash(module.forward) == hash(module.forward)
    assert copy.copy(module.forward) == module.forward
    assert inspect.isfunction(RemoteModule.forward)
    assert list(inspect.signature(module.forward).parameters) == ["args", "kwargs"]
    with pytest.raises(AttributeError, match="nothing"):
        module.forward.nothing  # noqa: B018
    assert repr(module.forward).startswith("<method forward of RemoteModule(")
    assert torch.equal(rpc.rpc_sync("w2", run, (module.forward, X)), module(X))
    module.forward = len
    assert module(X) == 2


def run(function: Any, *args: Any) -> Any:
    return function(*args)


def test_a_subclass_may_override_it() -> None:
    mine = Mine("w1", nn.Linear, (3, 1))
    remote = mine.forward_async(X).wait()
    assert torch.equal(mine(X), remote + 1)
    assert torch.equal(mine.forward(X), remote + 1)
    assert torch.equal(mine.forward.rpc_async(X).wait(), remote)
    assert torch.equal(mine.forward.remote(X).to_here(), remote)
    assert list(inspect.signature(mine.forward).parameters) == ["x"]


def test_the_forward_of_a_base_class_is_another_method() -> None:
    mine = Mine("w1", nn.Linear, (3, 1))
    assert mine.forward != super(Mine, mine).forward
    assert super(Mine, mine).forward == super(Mine, mine).forward
    assert len({mine.forward, super(Mine, mine).forward, mine.forward}) == 2


@pytest.mark.parametrize("kind", [Rows, AsyncRows])
@pytest.mark.parametrize("keep", [True, False])
def test_items_are_moved_from_a_device(kind: type[nn.Module], keep: bool) -> None:
    rref = rpc.remote("w1", kind)
    with rpc.stream("w1", owner.items_on_device, (rref, "cpu", keep, (X,), {"scale": 2.0})) as items:
        assert [item.tolist() for item in items] == expected(2.0)
    with pytest.raises(TypeError, match="returned a Tensor, not an iterator"):
        next(rpc.stream("w1", owner.items_on_device, (rpc.remote("w1", nn.Identity), "cpu", keep, (X,), {})))
    assert needs_moves("cuda:0")
    assert not needs_moves("cpu")


def test_closing_the_moved_items_closes_the_generator() -> None:
    closed: list[str] = []

    def rows() -> Iterator[Tensor]:
        try:
            yield X
        finally:
            closed.append("rows")

    async def async_rows() -> AsyncIterator[Tensor]:
        try:
            yield X
        finally:
            closed.append("async rows")

    async def read_one() -> None:
        items = owner._MovedAsyncItems(async_rows())
        assert torch.equal(await anext(items), X)
        await items.aclose()
        assert closed == ["async rows"]

    asyncio.run(read_one())
    items = owner._MovedItems(rows())
    assert torch.equal(next(items), X)  # type: ignore[call-overload]
    items.close()
    assert closed == ["async rows", "rows"]


def test_moved_items_may_have_no_close() -> None:
    items = owner._MovedItems(iter([X]))
    items.close()
    assert torch.equal(next(items), X)  # type: ignore[call-overload]

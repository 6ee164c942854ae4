"""`async def` and `async_execution` as methods of references and modules."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import rpc
from telegrad.nn import RemoteModule, owner
from telegrad.rpc.functions import async_execution

pytestmark = pytest.mark.usefixtures("clean")


def identity(x: Any) -> Any:
    return x


class Deferred(nn.Module):
    """Module whose methods all have deferred results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    async def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        await asyncio.sleep(0)
        if fail:
            raise KeyError("in forward")
        return self.linear(x)

    async def coroutine(self, x: Any, fail: bool = False) -> Any:
        got = await rpc.rpc_async("w0", identity, (x,))
        if fail:
            raise KeyError("in a coroutine")
        return [got, torch.is_grad_enabled()]

    @async_execution
    def future(self, x: Any, fail: bool = False) -> Any:
        def checked(done: Any) -> Any:
            if fail:
                raise RuntimeError("in a future")
            return [done.value(), True]

        return rpc.rpc_async("w0", identity, (x,)).then(checked)


NAMES = pytest.mark.parametrize("name", ["coroutine", "future"])


@NAMES
@pytest.mark.parametrize("on", ["w0", "w1"])
def test_through_a_reference(name: str, on: str) -> None:
    rref = rpc.remote(on, Deferred)
    assert getattr(rref.rpc_sync(), name)(1) == [1, True]
    assert getattr(rref.rpc_async(), name)(2).wait() == [2, True]
    assert getattr(rref.remote(), name)(3).to_here() == [3, True]

    async def awaited() -> Any:
        return await getattr(rref.call(), name)(4), await getattr(rref.rpc_async(), name)(5)

    assert asyncio.run(awaited()) == ([4, True], [5, True])


@NAMES
def test_errors_through_a_reference(name: str) -> None:
    rref = rpc.remote("w1", Deferred)
    for start in (
        getattr(rref.rpc_sync(), name),
        lambda *args: getattr(rref.rpc_async(), name)(*args).wait(),
        lambda *args: getattr(rref.remote(), name)(*args).to_here(),
    ):
        with pytest.raises((KeyError, RuntimeError), match=r"in a (coroutine|future)"):
            start(1, True)


@NAMES
def test_methods_of_a_remote_module(name: str) -> None:
    module = RemoteModule("w1", Deferred)
    assert getattr(module, name)(1) == [1, True]
    assert getattr(module.module_rref.rpc_async(), name)(2).wait() == [2, True]
    with pytest.raises((KeyError, RuntimeError), match=r"in a (coroutine|future)"):
        getattr(module, name)(1, True)


def test_a_deferred_forward() -> None:
    module = RemoteModule("w1", Deferred)
    x = torch.ones(2)
    assert torch.equal(module(x), module.forward_async(x).wait())
    state = module.state_dict()
    assert torch.allclose(module(x), x @ state["linear.weight"].T + state["linear.bias"])
    with pytest.raises(KeyError, match="in forward"):
        module(x, fail=True)
    with torch.no_grad():
        assert not module(x).requires_grad


def test_a_deferred_forward_on_a_device() -> None:
    rref = rpc.remote("w1", Deferred)
    for keep in (True, False):
        got = rpc.rpc_sync("w1", owner.forward_on_device, (rref, "cpu", keep, (torch.ones(2),), {}))
        assert got.shape == (2,)

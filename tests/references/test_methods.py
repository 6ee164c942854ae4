"""Methods of values that are known to exist, whose calls go the way of all calls: all is as with the first one."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad.errors import RpcTimeout
from telegrad.protocols.rref import RRefId
from telegrad.rpc import RRef
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, cluster

_open = threading.Event()


class Desk:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def take(self, *things: Any, **named: Any) -> int:
        self.seen.append((things, named))
        return len(self.seen)

    def last(self) -> Any:
        return self.seen[-1]

    def refuse(self) -> None:
        raise KeyError("closed")

    def wait(self) -> None:
        _open.wait()

    @property
    def broken(self) -> Any:
        raise AttributeError("inside")

    @async_execution
    def later(self, x: int) -> Any:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(x + 1)
        return future

    @async_execution
    def not_later(self) -> int:
        return 1

    async def soon(self, x: int) -> int:
        return x + 2


@pytest.fixture(scope="module")
def w() -> Iterator[Cluster]:
    with cluster(2) as workers:
        yield workers


@pytest.fixture
def desk(w: Cluster) -> RRef[Desk]:
    """It exists for all that its user knows."""
    rref = w[0].remote("w1", Desk)
    assert rref.rpc_sync().take() == 1
    return rref


def test_values_of_every_kind(desk: RRef[Desk]) -> None:
    assert desk.rpc_sync().take(1, (2, [3]), four="four") == 2
    assert desk.rpc_sync().last() == ((1, (2, [3])), {"four": "four"})
    assert desk.rpc_sync().take({1, 2}) == 3  # pickled
    assert desk.rpc_sync().last() == (({1, 2},), {})
    x = torch.arange(3.0)
    desk.rpc_sync().take(x)
    assert torch.equal(desk.rpc_sync().last()[0][0], x)


def test_a_reference_as_an_argument(desk: RRef[Desk], w: Cluster) -> None:
    mine = w[0].rref("mine")
    desk.rpc_sync().take(mine)
    (back,), _ = desk.rpc_sync().last()
    assert back.local_value() == "mine"


def test_results_that_come_later(desk: RRef[Desk]) -> None:
    assert desk.rpc_sync().later(1) == 2
    assert desk.rpc_sync().soon(1) == 3
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object, but got builtins.int from"):
        desk.rpc_sync().not_later()


def test_errors(desk: RRef[Desk]) -> None:
    with pytest.raises(KeyError, match="closed"):
        desk.rpc_sync().refuse()
    with pytest.raises(AttributeError, match="type object 'Desk' has no attribute 'nothing'"):
        desk.rpc_sync().nothing()
    with pytest.raises(AttributeError, match="inside"):
        desk.get_attr("broken")
    with pytest.raises(TypeError, match="positional argument"):
        desk.rpc_sync().last(1)


def test_a_time_out_names_the_method(desk: RRef[Desk]) -> None:
    _open.clear()
    try:
        with pytest.raises(RpcTimeout, match="wait") as failed:
            desk.rpc_sync(timeout=0.05).wait()
    finally:
        _open.set()
    assert "wait on w1" in str(failed.value)


def test_of_a_value_that_is_gone(desk: RRef[Desk], w: Cluster) -> None:
    """A reference that is made up is refused."""
    made_up = RRef.of(w[0]._worker, RRefId(1, 12345), 1)
    for function in ("take", type):
        with pytest.raises(RuntimeError, match="has been deleted"):
            w[0]._worker.calls.client.call(1, function, (), {}, 0, made_up)

"""Methods of values that are known to exist: ordinary calls."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rref_helpers import TIMEOUT, freed, make, started

from telegrad.errors import RpcTimeout
from telegrad.protocols.rref import RRefId
from telegrad.rpc import Options, RRef
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, Gate, cluster

SOON = 0.05  # s
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
    """Return a reference known to exist."""
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


@pytest.mark.parametrize("mode", ["call", "creation beyond its timeout"])
def test_a_receiver_is_kept_alive_until_its_method_has_run(mode: str) -> None:
    with cluster(2, Options(num_worker_threads=1)) as w:
        receiver, other = w[0].remote("w1", make, ("receiver",)), w[0].remote("w1", make, ("other",))
        for rref in (receiver, other):
            rref.rpc_sync().greet("x")
        receiver.remote(timeout=TIMEOUT).greet("x")  # its type is known
        gate = Gate()
        blocked = w[0].rpc_async("w1", gate.enter)  # w1 runs no other request until the gate opens
        gate.wait_for()
        if mode == "call":
            child = receiver.rpc_async().child("child")
        else:
            child = receiver.remote(timeout=SOON).child("child")
            with pytest.raises(RpcTimeout):
                child._get_future().wait()
        del receiver, other, rref
        assert freed("other").wait(TIMEOUT)  # its release follows where that of the receiver would have been
        assert not freed("receiver").is_set()
        gate.open()
        assert started("child").wait(TIMEOUT)
        blocked.wait()
        assert freed("receiver").wait(TIMEOUT)
        del child

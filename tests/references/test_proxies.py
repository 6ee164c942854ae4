"""Attributes of proxies, and the representation of references."""

import asyncio
import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rref_helpers import Gate, make_when_open

from telegrad import rpc
from telegrad.errors import OwnerLost, RemoteError, RpcTimeout, RRefDeleted, RRefError, SerializationError, WorkerLost
from telegrad.rref.proxy import RRefProxy
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("w")


class Model:
    kind = "class attribute"
    hook: Callable[[], str] | None = None

    def __init__(self) -> None:
        self.hook = hooked
        self.weight = torch.ones(2)
        self.layer = torch.nn.Linear(2, 1)

    @property
    def value(self) -> int:
        return 5

    @property
    def broken(self) -> int:
        raise ValueError("of the property")

    def double(self, x: int) -> int:
        return 2 * x


def hooked() -> str:
    return "called"


def make() -> Model:
    return Model()


@pytest.fixture(params=["rpc_sync", "rpc_async", "call", "remote"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_property_is_an_error_where_it_is_accessed(kind: str) -> None:
    rref = rpc.remote("w1", Model)
    proxy = getattr(rref, kind)()
    with pytest.raises(
        AttributeError,
        match=r"^'value' is a property of Model, not a method. Read an attribute with rref.get_attr\('value'\).$",
    ):
        proxy.value  # noqa: B018
    assert proxy.hook is not None  # whether it is callable is seen on the instance


def test_missing_attribute_is_an_error_of_the_call() -> None:
    rref = rpc.remote("w1", make)
    for _ in range(2):  # also where the value is known to exist
        with pytest.raises(TypeError, match=r"'weight' of Model is not a method but of type Tensor\. Read .*get_attr"):
            rref.rpc_sync().weight()
        assert rref.rpc_sync().double(2) == 4
    with pytest.raises(TypeError, match="'value' of Model is not a method but of type int"):
        rref.rpc_async().value().wait()
    known = rpc.remote("w1", Model)
    assert known.rpc_sync().hook() == "called"
    with pytest.raises(TypeError, match="'kind' of Model is not a method but of type str"):
        known.rpc_sync().kind()


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        iter,
        float,
        int,
        lambda v: v == 3,
        lambda v: v[0],
        lambda v: v.shape,
        lambda v: v + 1,
        lambda v: 1 - v,
        lambda v: v < 1,
        lambda v: 1 in v,
    ],
    ids=["bool", "len", "iter", "float", "int", "==", "[]", "attribute", "+", "-", "<", "in"],
)
def test_using_a_method_as_a_value_raises_advice(use: Callable[[Any], Any]) -> None:
    method = rpc.remote("w1", make).rpc_sync().weight
    with pytest.raises((TypeError, AttributeError)) as caught:
        use(method)
    assert "get_attr('weight')" in str(caught.value)


def test_drop_in_returns_partials_like_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", types.ModuleType("telegrad.compat.rpc"))
    proxy = rpc.remote("w1", Model).rpc_sync()
    assert proxy.value
    assert proxy.double != proxy.value
    with pytest.raises(TypeError, match="'int' object is not callable"):
        proxy.value()


def test_get_attr() -> None:
    there, here = rpc.remote("w1", make), rpc.RRef(Model())
    for rref in (there, here):
        assert torch.equal(rref.get_attr("weight"), torch.ones(2))
        assert rref.get_attr("value", timeout=20) == 5
        assert rref.get_attr("layer.weight").shape == (1, 2)  # which __getattr__ finds
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            rref.get_attr("nothing")
        with pytest.raises(ValueError, match=r"^of the property$"):
            rref.get_attr("broken")
    assert here.get_attr("layer") is here.local_value().layer
    assert here.get_attr("weight") is here.local_value().weight


def test_dir_lists_methods_if_the_class_is_known() -> None:
    known, unknown = rpc.remote("w1", Model), rpc.remote("w1", make)
    assert "double" in dir(known.rpc_sync())
    assert "value" not in dir(known.rpc_sync())
    assert "double" not in dir(unknown.rpc_sync())
    unknown._get_type()
    assert "double" in dir(unknown.rpc_sync())
    assert "double" in dir(rpc.RRef(Model()).remote())


def test_repr_shows_class_owner_and_state(w: Cluster) -> None:
    gate = Gate()
    waits = w[0].remote("w0", make_when_open, ("shown", gate))
    assert repr(waits) == f"<RRef to a value on w0 (this worker), id 0.{waits.id.local_id}, being made>"
    gate.open()
    waits.to_here()
    assert repr(waits) == f"<RRef to Tracked on w0 (this worker), id 0.{waits.id.local_id}, ready>"

    there = w[0].remote("w1", Model)
    there.to_here()
    assert repr(there) == f"<RRef to Model on w1, id 0.{there.id.local_id}, ready>"
    assert repr(there.rpc_sync().double) == f"<remote 'double' of {there!r}, not called>"

    fails = w[0].remote("w1", Model, (1, 2, 3))
    with pytest.raises(TypeError):
        fails.to_here()
    fails._get_future().wait()
    assert repr(fails).endswith(", failed>")


@pytest.mark.parametrize("use", ["to_here", "rpc_sync", "get_attr", "await"])
def test_first_use_after_the_owners_death_raises_its_loss(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2) as w:
        first_use_after_death(w, use, monkeypatch)


def first_use_after_death(w: Cluster, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rref = w[0].remote("w1", Model)
    rref.to_here()
    uses: dict[str, Callable[[], object]] = {
        "to_here": rref.to_here,
        "rpc_sync": lambda: rref.rpc_sync().double(1),
        "get_attr": lambda: rref.get_attr("value"),
        "await": lambda: asyncio.run(awaited(rref)),
    }
    w[1]._worker.close()
    monkeypatch.setattr(w[0]._worker.references, "check", lambda *_: None)  # as if no word of it had been taken up
    with pytest.raises(OwnerLost, match=r"was lost with its owner, worker w1: ") as caught:
        uses[use]()
    assert isinstance(caught.value, WorkerLost)
    assert not isinstance(caught.value, RemoteError)


async def awaited(rref: Any) -> Any:
    return await rref


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async", "remote", "stream"])
def test_a_proxy_cannot_be_sent(w: Cluster, kind: str) -> None:
    proxy = getattr(w[0].remote("w1", Model), kind)()
    for use in (lambda: w[0].rpc_sync("w1", id, (proxy,)), lambda: copy.copy(proxy), lambda: pickle.dumps(proxy)):
        with pytest.raises(SerializationError, match=r"cannot be sent, copied or pickled\. Send the RRef"):
            use()


class Private:
    def _run(self, x: int) -> int:
        return x + 1

    def _kind(self, x: int) -> int:
        return x + 2

    def _timeout(self, x: int) -> int:
        return x + 3

    def _rref(self, x: int) -> int:
        return x + 4


def test_private_methods_of_a_value(w: Cluster) -> None:
    rref = w[0].remote("w1", Private)
    for proxy in (rref.rpc_sync(), rref.rpc_sync(5)):
        assert [proxy._run(0), proxy._kind(0), proxy._timeout(0), proxy._rref(0)] == [1, 2, 3, 4]


def test_a_proxy_without_a_reference_has_no_attributes() -> None:
    proxy: Any = RRefProxy.__new__(RRefProxy)
    with pytest.raises(AttributeError, match="_rref"):
        proxy.anything  # noqa: B018


def test_timeout_while_the_value_is_created(w: Cluster) -> None:
    gate = Gate()
    rref = w[0].remote("w1", make_when_open, ("later", gate))
    for use in (lambda: rref.to_here(0.05), lambda: rref.rpc_async(0.05).double(1).wait()):
        with pytest.raises(RpcTimeout, match=r"queued.*until its value has been created"):
            use()
    gate.open()
    rref.to_here()


def test_a_reference_of_another_worker_of_the_group(w: Cluster) -> None:
    rref = w[1].rref(5)
    with pytest.raises(RRefError, match=r"belongs to worker w1, and cannot be sent in calls of worker w0"):
        w[0].rpc_sync("w1", id, (rref,))


def test_a_reference_of_an_earlier_membership(w: Cluster) -> None:
    with cluster(2) as earlier:
        rrefs = [earlier[0].rref(5), earlier[0].remote("w1", Model)]
    for rref in rrefs:
        with pytest.raises(RRefDeleted, match="was released when its worker shut down"):
            w[0].rpc_sync("w1", id, (rref,))

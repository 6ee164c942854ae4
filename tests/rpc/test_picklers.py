"""`rpc.use_pickler` and `rpc.register_type`: how values travel."""

import abc
import asyncio
import collections
import functools
import json
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pickler_helpers import Plain

from telegrad import autograd, rpc
from telegrad.errors import RemoteError, RpcTimeout, SerializationError, TelegradError
from telegrad.nn import RemoteModule
from telegrad.rpc.internal import _InternalRPCPickler
from telegrad.testing import Cluster, cluster
from telegrad.worker.calls import interceptors

pytestmark = [pytest.mark.usefixtures("clean")]


def identity(x: Any) -> Any:
    return x


async def identity_later(x: Any) -> Any:
    await asyncio.sleep(0)
    return x


def fail(text: str) -> None:
    raise KeyError(text)


class Json:
    """Pickler that changes tuples to lists, so its use shows."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.seen.append(("serialize", value))
        tensors: list[torch.Tensor] = []

        def default(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                raise TypeError(f"no JSON for {type(each).__name__}")
            tensors.append(each)
            return {"tensor": len(tensors) - 1}

        return json.dumps(value, default=default).encode(), tensors

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        def hook(each: Any) -> Any:
            return tensors[each["tensor"]] if each.keys() == {"tensor"} else each

        value = json.loads(data, object_hook=hook)
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict):
            value = tuple(value)
        self.seen.append(("deserialize", value))
        return value


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not interceptors.active


@pytest.fixture
def both(two: Cluster) -> Iterator[tuple[Any, Any]]:
    picklers = Json(), Json()
    registrations = []
    for worker, pickler in zip(two, picklers, strict=True):
        with worker:
            registrations.append(rpc.use_pickler(pickler))
    yield picklers
    for registration in registrations:
        registration.remove()


@pytest.mark.parametrize("function", [identity, identity_later, lambda x: x])
def test_arguments_and_results_pass_the_picklers(both: Any, function: Any) -> None:
    assert rpc.rpc_sync("w1", function, ((1, "a"),)) == [1, "a"]
    mine, theirs = both
    assert mine.seen == [("serialize", (((1, "a"),), {})), ("deserialize", [1, "a"])]
    assert theirs.seen == [("deserialize", ([[1, "a"]], {})), ("serialize", [1, "a"])]


def count(n: int) -> Iterator[int]:
    yield from range(n)


@pytest.mark.parametrize("function", [identity, lambda x: x], ids=["by name", "by value"])
def test_picklers_get_the_arguments_of_the_program_s_function(both: Any, function: Any) -> None:
    mine, theirs = both
    assert rpc.rpc_sync("w1", function, ((1,),), retry=rpc.Retry()) == [1]
    assert list(rpc.map("w1", function, [(1,), (2,)], chunk=2)) == [[1], [2]]
    assert list(rpc.stream("w1", count, kwargs={"n": 1})) == [0]
    given = [(((1,),), {}), (([(1,), (2,)],), {}), ((), {"n": 1})]
    assert [value for kind, value in mine.seen if kind == "serialize"][:3] == given
    assert [value for kind, value in theirs.seen if kind == "deserialize"][:3] == [
        ([[1]], {}), ([[[1], [2]]], {}), ([], {"n": 1}),
    ]  # fmt: skip


def test_functions_of_telegrad_do_not_use_the_pickler(both: Any) -> None:
    assert rpc.remote("w1", range, (3,)).get_attr("stop") == 3
    module = RemoteModule("w1", torch.nn.Linear, (2, 2))
    assert module(torch.ones(2)).shape == (2,)
    assert len(module.remote_parameters()) == 2
    for pickler in both:
        pickler.seen.clear()  # it has tensors


@pytest.mark.usefixtures("both")
def test_all_kinds_of_calls() -> None:
    assert rpc.rpc_async("w1", identity, kwargs={"x": (1,)}).wait() == [1]
    assert asyncio.run(rpc.call("w1", identity, ((1,),))) == [1]
    assert [future.wait() for future in rpc.multicast(["w0", "w1"], identity, ((1,),))] == [[1], [1]]
    rref = rpc.remote("w1", list, ((1, 2),))
    assert rref.to_here() == [1, 2]
    assert rref.rpc_sync().count(1) == 1
    assert rref.remote().copy().to_here() == [1, 2]


def test_tensors_are_recorded(both: Any) -> None:
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("w1", torch.mul, (x, 3)).sum()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((2,), 3.0))
    for pickler in both:
        pickler.seen.clear()  # it has the tensors


@pytest.mark.usefixtures("both")
def test_errors_travel_as_always() -> None:
    with pytest.raises(KeyError, match="text") as raised:
        rpc.rpc_sync("w1", fail, ("text",))
    assert isinstance(raised.value, RemoteError)


@pytest.mark.usefixtures("both")
def test_values_that_the_pickler_refuses() -> None:
    with pytest.raises(TypeError, match="no JSON for set") as raised:
        rpc.rpc_sync("w1", identity, ({1},))
    assert not isinstance(raised.value, RemoteError)
    with pytest.raises(TypeError, match="no JSON for set") as raised:
        rpc.rpc_sync("w1", set, ([1],))
    assert isinstance(raised.value, RemoteError)


class Wrong(Plain):
    """Pickler with one wrong method."""

    def __init__(self, **wrong: Any) -> None:
        vars(self).update(wrong)


def refuse(*_: object) -> None:
    raise ValueError("the pickler refuses")


def owner_of(rref: Any) -> str:
    return rref.owner_name()


@pytest.mark.parametrize("pickler", [Plain(), _InternalRPCPickler()], ids=["pickle", "torch's"])
def test_references_are_pickled(two: Cluster, pickler: Any) -> None:
    with two[1]:
        theirs = rpc.use_pickler(pickler)
    with rpc.use_pickler(pickler), theirs:
        rref = rpc.RRef(torch.ones(2))
        assert rpc.rpc_sync("w1", owner_of, (rref,)) == "w0"
        back = rpc.rpc_sync("w1", identity, (rref,))
        assert back.is_owner()
        del back, rref
        assert list(rpc.map("w1", identity_later, range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "text"),
    [
        (Plain(), None, SerializationError, "sender's pickler Plain has encoded, and this worker uses no pickler"),
        (Wrong(serialize=refuse), Plain(), ValueError, "the pickler refuses"),
        (
            Wrong(serialize=lambda _: b"x"),
            Plain(),
            SerializationError,
            "returned b'x' from serialize: it has to",
        ),
        (Wrong(serialize=lambda _: (b"x", [1])), Plain(), SerializationError, "a tuple of bytes and a list of tensors"),
        (Wrong(deserialize=refuse), Plain(), ValueError, "the pickler refuses"),
        (Plain(), Wrong(serialize=refuse), ValueError, "the pickler refuses"),
        (Plain(), Wrong(serialize=lambda _: None), SerializationError, "returned None from serialize"),
        (Plain(), Wrong(deserialize=refuse), ValueError, "the pickler refuses"),
        (Plain(), Wrong(deserialize=lambda *_: 7), SerializationError, "returned 7 from deserialize"),
    ],
)
def test_errors_of_picklers(two: Cluster, mine: Any, theirs: Any, error: type[Exception], text: str) -> None:
    registrations = [rpc.use_pickler(mine)]
    if theirs is not None:
        with two[1]:
            registrations.append(rpc.use_pickler(theirs))
    for start in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
        with pytest.raises(error, match=text):
            start("w1", identity, (1,))
    for registration in registrations:
        registration.remove()
    assert rpc.rpc_sync("w1", identity, (1,)) == 1


def test_a_worker_without_a_pickler_is_answered_as_usual(two: Cluster) -> None:
    with two[1]:
        registration = rpc.use_pickler(Wrong(serialize=refuse, deserialize=refuse))
    with registration:
        assert rpc.rpc_sync("w1", identity, ((1,),)) == (1,)


def test_invalid_picklers() -> None:
    with pytest.raises(TypeError, match="a pickler needs a method serialize"):
        rpc.use_pickler(object())  # type: ignore[arg-type]
    with rpc.use_pickler(Plain()), pytest.raises(TelegradError, match="worker w0 already uses the pickler Plain"):
        rpc.use_pickler(Plain())


def test_a_pickler_ends_with_its_worker() -> None:
    with cluster(1, names="x{}", current=None, graceful=False) as group:
        with group[0]:
            registration = rpc.use_pickler(Plain())
            assert rpc.rpc_sync("x0", identity, (1,)) == 1
        group[0].shutdown(graceful=False)
        assert not interceptors.active
        registration.remove()


# ---- registered types


class Image:
    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels

    def __reduce__(self) -> Any:
        raise TypeError("images have no pickle")


def is_shared(image: Image) -> bool:
    return image.pixels.numel() > 0


def pack(image: Image) -> Any:
    if image.pixels is None:
        raise ValueError("no pixels")
    return image.pixels


def unpack(pixels: Any) -> Image:
    if pixels.numel() == 1:
        raise ValueError("too few pixels")
    return Image(pixels)


@pytest.fixture(scope="module")
def registered(two: Cluster) -> None:
    for worker in two:
        with worker:
            rpc.register_type(Image, pack, unpack)


@pytest.mark.usefixtures("registered")
def test_registered_types_travel_in_both_directions() -> None:
    image = rpc.rpc_sync("w1", identity, ({"image": [Image(torch.ones(10_000))]},))["image"][0]
    assert type(image) is Image
    assert torch.equal(image.pixels, torch.ones(10_000))
    with autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        got = rpc.rpc_sync("w1", identity, (Image(x),))
        autograd.backward(context, [got.pixels.sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.ones(3))


@pytest.mark.usefixtures("registered")
def test_errors_of_a_types_functions() -> None:
    with pytest.raises(ValueError, match="no pixels") as raised:
        rpc.rpc_sync("w1", identity, (Image(None),))
    assert not isinstance(raised.value, RemoteError)
    with pytest.raises(ValueError, match="too few pixels") as raised:
        rpc.rpc_sync("w1", identity, (Image(torch.ones(1)),))
    assert isinstance(raised.value, RemoteError)
    with pytest.raises(ValueError, match="no pixels") as raised:
        rpc.rpc_sync("w1", Image, (None,))
    assert isinstance(raised.value, RemoteError)
    with pytest.raises(ValueError, match="too few pixels") as raised:
        rpc.rpc_sync("w1", Image, (torch.ones(1),))
    assert not isinstance(raised.value, RemoteError)


@pytest.mark.usefixtures("registered")
def test_invalid_types() -> None:
    with pytest.raises(ValueError, match="Image is already registered on worker w0"):
        rpc.register_type(Image, pack, unpack)
    kinds = (
        int, type, object, slice, range, Exception, types.FunctionType, types.NoneType, abc.ABCMeta,
        collections.OrderedDict, functools.partial, torch.Tensor, torch.Size, torch.dtype, torch.nn.Linear,
        rpc.RRef, rpc.WorkerInfo, RpcTimeout,
    )  # fmt: skip
    for kind in kinds:
        with pytest.raises(ValueError, match=f"Telegrad encodes {kind.__qualname__} itself"):
            rpc.register_type(kind, identity, identity)
    with pytest.raises(TypeError, match="a class and two functions"):
        rpc.register_type("Image", identity, identity)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a class and two functions"):
        rpc.register_type(Wrong, None, identity)  # type: ignore[arg-type]


class Temperature:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_the_registration_of_a_type_ends() -> None:
    with rpc.register_type(Temperature, lambda t: t.degrees, lambda degrees: Temperature(degrees + 1)) as registration:
        assert rpc.rpc_sync("w1", degrees_of, (Temperature(1.0),)) == 2
    assert rpc.rpc_sync("w1", degrees_of, (Temperature(1.0),)) == 1
    again = rpc.register_type(Temperature, lambda t: t.degrees, lambda degrees: Temperature(degrees + 2))
    registration.remove()  # has ended, and so changes nothing
    assert rpc.rpc_sync("w1", degrees_of, (Temperature(1.0),)) == 3
    again.remove()


def degrees_of(temperature: Temperature) -> float:
    return temperature.degrees

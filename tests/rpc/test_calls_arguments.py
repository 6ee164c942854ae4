"""Destinations, forms of arguments, and round trips of values."""

import asyncio
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import sys
import threading
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from telegrad import rpc
from telegrad.errors import RemoteError, UnknownWorker
from telegrad.testing import Cluster

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]


def where(*args: Any, **kwargs: Any) -> Any:
    return rpc.get_worker_info().name, args, kwargs


def echo(x: Any) -> Any:
    return x


# ---- to


@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_a_worker_by_name_rank_or_info(to: Any) -> None:
    assert rpc.rpc_sync(to, where)[0] == "w1"
    assert rpc.rpc_async(to, where).wait()[0] == "w1"
    assert rpc.remote(to, where).to_here()[0] == "w1"
    assert rpc.get_worker_info(to) == rpc.WorkerInfo("w1", 1)


@pytest.mark.parametrize("to", ["w0", 0, rpc.WorkerInfo("w0", 0)])
def test_a_worker_may_call_itself(to: Any) -> None:
    tensor = torch.zeros(2)
    got = rpc.rpc_sync(to, echo, (tensor,))
    assert torch.equal(got, tensor)
    got += 1
    assert tensor.sum() == 0  # a copy, as from elsewhere
    assert rpc.rpc_async(to, where).wait()[0] == "w0"
    rref = rpc.remote(to, where)
    assert rref.is_owner()
    assert rref.to_here()[0] == "w0"


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("nope", "name:w0,rank:0 could not find destination name nope"),
        (7, "name:w0,rank:0 could not find destination id 7"),
        (-1, "could not find destination id -1"),
        (rpc.WorkerInfo("w7", 7), "could not find destination id 7"),
    ],
)
def test_an_unknown_worker(to: Any, text: str) -> None:
    for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(UnknownWorker, match=text):
            start(to, where)
    with pytest.raises(RuntimeError, match="w0, w1"):  # the existing workers
        rpc.get_worker_info(to)


@pytest.mark.parametrize("to", [1.5, None, [], b"w1"])
def test_values_that_are_no_worker_raise(to: Any) -> None:
    for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
            start(to, where)


# ---- forms


@pytest.mark.parametrize("start", ["sync", "async", "remote"])
def test_forms_of_arguments(two: Cluster, start: str) -> None:
    def call(*given: Any, **named: Any) -> Any:
        if start == "sync":
            return rpc.rpc_sync("w1", where, *given, **named)
        if start == "async":
            return rpc.rpc_async("w1", where, *given, **named).wait()
        return rpc.remote("w1", where, *given, **named).to_here()

    assert call() == ("w1", (), {})
    assert call(None, None) == ("w1", (), {})
    assert call((), {}) == ("w1", (), {})
    assert call((1,)) == ("w1", (1,), {})
    assert call([1, 2]) == ("w1", (1, 2), {})
    assert call(args=[1], kwargs={"a": 2}) == ("w1", (1,), {"a": 2})
    assert call(kwargs={"a": None}) == ("w1", (), {"a": None})
    assert call((None,)) == ("w1", (None,), {})
    assert call(torch.Size((2, 3))) == ("w1", (2, 3), {})


@pytest.mark.parametrize("args", [([],), ((),), ({},), (None, [])])
def test_empty_values_are_arguments(args: Any) -> None:
    assert rpc.rpc_sync("w1", where, args) == ("w1", args, {})


# ---- values


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    values: list[int]
    tensor: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    key: int


class Color(enum.Enum):
    RED = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Weird(dict[str, int]):
    pass


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self.a == other.a

    def __hash__(self) -> int:
        return hash(self.a)


def name_of_value(value: Any) -> str:
    """Return a name that does not depend on the order of a set."""
    items = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    return f"{type(value).__name__}-{str(items)[:12]!a}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63,
        -(2**200),
        0.5,
        float("inf"),
        1 + 2j,
        "",
        "Grüße, 世界 🐍 \x00 \ud800",
        b"\x00\xff",
        bytearray(b"abc"),
        (),
        [],
        {},
        set(),
        {1, "a", (2, 3)},
        frozenset({1}),
        (1, [2, {"three": (4,)}]),
        {1: 2, "a": None, (1, 2): [], None: 3, 1.5: True},
        Point(1, [Point(2, 3)]),
        Record("r", [1]),
        Frozen(3),
        Color.RED,
        Flags.A | Flags.B,
        Weird(a=1),
        Slots(4),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
        collections.defaultdict(list, {"a": [1]}),
        range(3),
        slice(1, 2, 3),
        Ellipsis,
        NotImplemented,
        int,
        Record,
        where,
        len,
        dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=5),
        pathlib.PurePosixPath("/a/b"),
        torch.float32,
        torch.device("cpu"),
        torch.Size((1, 2)),
        torch.strided,
        torch.contiguous_format,
        rpc.WorkerInfo("w1", 1),
        np.float32(1.5),
        np.dtype("int16"),
    ],
    ids=name_of_value,
)
def test_values_survive_the_round_trip(value: Any) -> None:
    for shape in (value, [value], {"k": (value, value)}):
        got = rpc.rpc_sync("w1", echo, (shape,))
        assert got == shape
        assert type(got) is type(shape)
    inner = rpc.rpc_sync("w1", echo, ([value],))[0]
    assert type(inner) is type(value)


def test_nan_survives_the_round_trip() -> None:
    got = rpc.rpc_sync("w1", echo, (float("nan"),))
    assert math.isnan(got)


def test_identities_within_a_message_are_kept() -> None:
    shared = [1]
    first, second = rpc.rpc_sync("w1", echo, ((shared, shared),))
    assert first is second
    loop: list[Any] = []
    loop.append(loop)
    got = rpc.rpc_sync("w1", echo, (loop,))
    assert got[0] is got


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6.0)[::2],
        np.zeros((0, 3)),
        np.array(5),
        np.array(["a", "bc"]),
        np.array([None, {}], dtype=object),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros(100_000, dtype=np.float32),
    ],
    ids=lambda a: f"{a.dtype.kind}{a.shape}",
)
def test_numpy_arrays(array: Any) -> None:
    got = rpc.rpc_sync("w1", echo, (array,))
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert (got == array).all()
    if got.size:
        got[...] = got  # writable


def test_big_codec_values() -> None:
    text = "é" * 3_000_000
    assert rpc.rpc_sync("w1", echo, (text,)) == text
    data = bytes(range(256)) * 40_000
    assert rpc.rpc_sync("w1", echo, (data,)) == data
    numbers = list(range(200_000))
    assert rpc.rpc_sync("w1", echo, (numbers,)) == numbers
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert rpc.rpc_sync("w1", echo, (deep,)) == deep


def test_too_deep_nesting_raises() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RuntimeError, match="nested too deeply"):
        rpc.rpc_sync("w1", echo, (deep,))
    assert rpc.rpc_sync("w1", echo, (1,)) == 1


def test_results_that_cannot_be_sent_are_errors_at_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "telegrad.remote")
    with pytest.raises(RuntimeError, match=r"cannot pickle.*lock"):
        rpc.rpc_sync("w1", threading.Lock)
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync("w1", torch.futures.Future)
    assert "lock" in caplog.text  # and the callee logs it


CALLS: dict[str, Any] = {
    "rpc_sync": lambda **how: rpc.rpc_sync("w1", echo, **how),
    "rpc_async": lambda **how: rpc.rpc_async("w1", echo, **how),
    "remote": lambda **how: rpc.remote("w1", echo, **how),
    "call": lambda **how: asyncio.run(rpc.call("w1", echo, **how)),
    "multicast": lambda **how: rpc.multicast(["w0", "w1"], echo, **how),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("args", [torch.ones(1), "text", 5, {"a": 1}, {1, 2}], ids=lambda a: type(a).__name__)
def test_arguments_that_are_no_tuple_are_an_error_at_the_caller(call: str, args: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^args has to be a tuple or list, and is of type .*\(value,\), with the comma"
    ) as caught:
        CALLS[call](args=args)
    assert not isinstance(caught.value, RemoteError)
    with pytest.raises(TypeError, match=r"^kwargs has to be a dict of names and values, and is of type list"):
        CALLS[call](args=(1,), kwargs=[("x", 1)])
    with pytest.raises(TypeError, match=r"^timeout has to be a number of seconds \(0 for no limit"):
        CALLS[call](args=(1,), timeout=None)


def test_drop_in_unpacks_arguments_like_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", types.ModuleType("telegrad.compat.rpc"))
    assert rpc.rpc_sync("w1", echo, args=torch.ones(1)) == torch.ones(())
    assert rpc.rpc_sync("w1", echo, args="x") == "x"
    assert rpc.remote("w1", echo, args={5}).to_here() == 5

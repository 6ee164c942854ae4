"""Tests of ``allow_pickle=False``: what travels, and that no pickle is loaded."""

import dataclasses
import functools
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from trust_helpers import EXPOSED, Canary, Net, call_in_every_form, count, double, use_library

from telegrad import errors, rpc
from telegrad.compat.rpc import invoke
from telegrad.errors import PickleRefused, RemoteError, SerializationError, WorkerLost
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import Worker, internal
from telegrad.serialize.pickling import Serializer
from telegrad.testing import Cluster, cluster, eventually, run_all
from telegrad.wire import BodyKind, Flag, Status, Tag
from telegrad.worker.serving.exposure import exposed

STRICT = rpc.Options(allow_pickle=False)


@pytest.fixture
def mixed() -> Iterator[Cluster]:
    """A worker w0 that sends pickles, and a worker w1 that loads none."""
    store = HashStore()
    options = (rpc.Options(), rpc.Options(allow_pickle=False))
    workers = run_all([lambda rank=rank: Worker(f"w{rank}", rank, 2, options[rank], store=store) for rank in (0, 1)])  # type: ignore[misc]
    group = Cluster(workers, store)
    try:
        with group[0]:
            yield group
    finally:
        for worker in group:
            worker.shutdown(graceful=False)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    file = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(str(file))))
    assert file.exists()  # it would be seen
    file.unlink()
    yield Canary(str(file))
    assert not file.exists()


def echo(value: Any = None, **named: Any) -> Any:
    return named or value


def kept(value: object) -> "list[object]":
    return [value]


# ---- plain data travels


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    parts: "tuple[torch.Tensor, ...]"
    seen: set[str] = dataclasses.field(default_factory=set)
    size: int = dataclasses.field(init=False, default=3)


def shared_list() -> Any:
    part = [1]
    return [part, part, {"a": part}]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        (True, -(1 << 70), 1.5, 2j, "text", b"bytes", [1, (2,)], {"a": {1: None}}),
        {1, (2, 3), "a"},
        frozenset({frozenset({1})}),
        [{1}, {"a": {2}}, bytearray(b"x")],
        [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
        shared_list(),
        ["x" * 5000] * 3,
        [b"x" * 5000] * 3,
        ("é" * 3000, {"é" * 3000}),
        nested(60),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_plain_data(value: Any, strict: Cluster) -> None:
    result = rpc.rpc_sync("w1", echo, (value,))
    assert result == value
    assert repr(result) == repr(value) or "{" in repr(value)
    assert rpc.rpc_sync("w1", echo, (), {"named": value}) == {"named": value}
    assert rpc.remote("w1", kept, (value,)).to_here() == [value]


def test_tensors_that_share_memory_become_copies(strict: Cluster) -> None:
    x = torch.arange(6.0)
    first, row, again, parameter = rpc.rpc_sync("w1", echo, ((x, x[:3], x, torch.nn.Parameter(x)),))
    assert first.equal(x)
    assert row.equal(x[:3])
    assert again is first
    assert type(parameter) is torch.nn.Parameter
    row.zero_()
    assert first.equal(x)


def test_references_travel(strict: Cluster) -> None:
    mine, theirs = rpc.RRef([1]), rpc.remote("w1", kept, (2,))
    found = rpc.rpc_sync("w1", echo, ([{"refs": {1}}, mine, theirs],))
    assert found[1].to_here() == [1]
    assert found[2].to_here() == [2]


def test_registered_types_travel(strict: Cluster) -> None:
    value = Point(1, (torch.ones(2),), {"a"})
    with pytest.raises(PickleRefused, match=r"args\[0\]\[1\], of type .*\.Point: .*rpc\.register_type"):
        rpc.rpc_sync("w1", echo, ([1, value],))
    with rpc.register_type(Point):
        with pytest.raises(SerializationError, match=r"test_no_pickle:Point', which this worker does not know"):
            rpc.rpc_sync("w1", echo, (value,))
        with strict[1], rpc.register_type(Point), strict[0]:
            found = rpc.rpc_sync("w1", echo, (value,))
    assert found.parts[0].equal(torch.ones(2))
    assert (found.x, found.seen, found.size) == (1, {"a"}, 3)


def test_the_end_of_a_registration_keeps_that_of_another_class_of_the_same_name(strict: Cluster) -> None:
    again = type("Point", (Point,), {"__module__": Point.__module__, "__qualname__": "Point"})
    first = rpc.register_type(Point)
    with rpc.register_type(again, lambda each: each.x, lambda x: again(x, ())):
        first.remove()
        plain = strict[0]._worker.messages.serializer.plain
        assert plain._object_of(("test_no_pickle:Point", 3)).x == 3


def test_the_receiver_uses_its_own_function_for_a_registered_type(strict: Cluster) -> None:
    rpc.register_type(Point, lambda point: point.x, lambda x: Point(x, ()))
    with strict[1]:
        rpc.register_type(Point, lambda point: point.x, lambda x: Point(10 * x, ()))
    assert rpc.rpc_sync("w1", echo, (Point(1, ()),)).x == 10


def test_a_dataclass_comes_with_the_fields_that_it_has_here(mixed: Cluster) -> None:
    with mixed[1], rpc.register_type(Point), mixed[0]:
        unpack = mixed[1]._worker.messages.serializer.plain._object_of
        with pytest.raises(SerializationError, match="other fields"):
            unpack(("test_no_pickle:Point", {"x": 1}))


@pytest.mark.parametrize(
    "packed", [("bytearray", 1 << 60), ("set", 1), ("torch.dtype", "os"), ("torch.nn.Parameter", 1), ("no:type", 1)]
)
def test_records_with_other_values(packed: tuple[str, Any]) -> None:
    with pytest.raises((SerializationError, TypeError, KeyError)):
        Serializer().plain._object_of(packed)


def test_calls_in_every_form(strict: Cluster) -> None:
    call_in_every_form()
    assert list(rpc.map("w1", echo, [{1}, {2}])) == [{1}, {2}]
    net = rpc.remote("w1", Net)
    assert net.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 1)
    assert net.rpc_sync(timeout=5).forward(torch.ones(1, 2)).shape == (1, 1)
    assert net.remote().forward(torch.ones(1, 2)).to_here().shape == (1, 1)
    assert net.get_attr("size") == 2


def test_the_library_works_without_pickles(strict: Cluster) -> None:
    use_library(strict)


def test_the_library_works_with_a_list_and_without_pickles() -> None:
    for name in EXPOSED:
        rpc.expose(f"trust_helpers:{name}")
    try:
        with cluster(2, rpc.Options(allow_pickle=False, expose="listed")) as group:
            use_library(group)
    finally:
        for name in EXPOSED:
            exposed.remove("trust_helpers", name)


# ---- anything else is refused at the sender


class Color(Enum):
    RED = 1


Pair = namedtuple("Pair", "x y")  # a type that looks like a tuple
loop: list[Any] = []
loop += [loop, loop]  # copies of it would be countless


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, {"a": object()}], r"args\[0\]\[1\]\['a'\], of type object"),
        (lambda: None, r"args\[0\], of type function"),
        ([Net], r"args\[0\]\[0\], of type type"),
        (Color.RED, r"args\[0\], of type test_no_pickle\.Color"),
        (
            {"p": Pair(1, 2)},
            r"args\[0\]\['p'\], of type test_no_pickle\.Pair: .* send tuple\(value\), or register its type",
        ),
        (OrderedDict(a=1), r"args\[0\], of type collections\.OrderedDict: .*: send dict\(value\)$"),
        (range(3), r"args\[0\], of type range: .*: send tuple\(value\)$"),
        (torch.ones(2, 2).max(0), r"of type torch\.return_types\.max: .*: send tuple\(value\)$"),
        ({Color.RED: 1}, r"args\[0\] \(its key <Color>\), of type test_no_pickle\.Color"),
        ({Color.RED}, r"args\[0\]\[0\], of type test_no_pickle\.Color"),
        (torch.eye(2).to_sparse(), r"args\[0\], of type torch\.Tensor \(torch\.sparse_coo"),
        (loop, "contains itself"),
        (nested(100), "nested too deeply"),
        ("\ud800", "not valid Unicode"),
        (ValueError("x"), r"args\[0\], of type ValueError: .*: send it in this form$"),
    ],
    ids=[
        "object",
        "function",
        "class",
        "enum",
        "named tuple",
        "ordered dict",
        "range",
        "named results",
        "enum key",
        "enum item",
        "sparse tensor",
        "loop",
        "depth",
        "surrogate",
        "exception",
    ],
)
def test_the_sender_names_what_it_does_not_send(value: Any, path: str, strict: Cluster) -> None:
    for call in (
        lambda: rpc.rpc_sync("w1", echo, (value,)),
        lambda: rpc.rpc_async("w1", echo, (value,)).wait(),
        lambda: rpc.remote("w1", kept, (value,)),
    ):
        with pytest.raises(PickleRefused, match=path):
            call()


def give(what: str) -> Any:
    return {"object": object(), "function": give}[what]


def items(what: str) -> Iterator[Any]:
    yield 1
    yield give(what)


def test_the_callee_names_the_result_that_it_does_not_send(strict: Cluster) -> None:
    with pytest.raises(PickleRefused, match=r"cannot send result, of type object"):
        rpc.rpc_sync("w1", give, ("object",))
    with pytest.raises(PickleRefused, match=r"cannot send result, of type function"):
        rpc.remote("w1", give, ("function",)).to_here()
    stream = iter(rpc.stream("w1", items, ("object",)))
    assert next(stream) == 1
    with pytest.raises(SerializationError, match="object"):
        next(stream)
    with pytest.raises(SerializationError, match="object"):
        list(rpc.map("w1", give, ["object"]))


def test_functions_without_a_name_are_refused(strict: Cluster) -> None:
    for function in (lambda: 1, functools.partial(double, 1), [].append):
        with pytest.raises(PickleRefused, match=r"cannot send the function, of type"):
            rpc.rpc_sync("w1", function)


def test_picklers_are_refused(strict: Cluster) -> None:
    with pytest.raises(errors.TelegradError, match="can use no pickler"):
        rpc.use_pickler(internal._internal_rpc_pickler)
    with rpc.api._use_rpc_pickler(internal._internal_rpc_pickler), pytest.raises(PickleRefused, match="pickler"):
        rpc.rpc_sync("w1", double, (1,))


# ---- no pickle is loaded, in whatever position it comes


def give_canary(path: str) -> Any:
    return Canary(path)


def canaries(path: str) -> Iterator[Any]:
    yield Canary(path)


class CanaryError(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __copy__(self) -> "CanaryError":  # its owner raises copies
        return CanaryError(self.path)

    def __reduce__(self) -> Any:
        return Canary(self.path).__reduce__()


def raise_canary(path: str) -> None:
    raise CanaryError(path)


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises((PickleRefused, RemoteError)) as caught:
        call()
    assert "pickle" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))


SENT: dict[str, Callable[[Canary], Any]] = {
    "args": lambda canary: rpc.rpc_sync("w1", echo, (canary,)),
    "args of rpc_async": lambda canary: rpc.rpc_async("w1", echo, ([canary],)).wait(),
    "kwargs": lambda canary: rpc.rpc_sync("w1", echo, (), {"a": canary}),
    "callable": lambda canary: rpc.rpc_sync("w1", functools.partial(echo, canary)),
    "callable of a retry": lambda canary: rpc.rpc_sync("w1", functools.partial(echo, canary), retry=rpc.Retry()),
    "creation": lambda canary: rpc.remote("w1", kept, (canary,)).to_here(),
    "method": lambda canary: rpc.remote("w1", Net).rpc_sync().forward(canary),
    "fork in a pickle": lambda canary: rpc.rpc_sync("w1", echo, ([rpc.RRef(1), canary],)),
    "stream": lambda canary: list(rpc.stream("w1", count, (canary,))),
    "chunk of a map": lambda canary: list(rpc.map("w1", echo, [canary])),
    "multicast": lambda canary: rpc.multicast(["w1"], echo, (canary,))[0].wait(),
    "pickler of torch": lambda canary: _with_torchs_pickler(canary),
    "pickled call": lambda canary: invoke._invoke_rpc_python_udf(
        rpc.get_worker_info("w1"), *internal.serialize(internal.PythonUDF(echo, (canary,), {})), 10.0, False
    ).wait(),
    "optimizer": lambda canary: DistributedOptimizer(torch.optim.SGD, [_parameter()], lr=canary),
    "state of an optimizer": lambda canary: _load_state(canary),
    "gathering": lambda canary: rpc.rpc_sync("w1", rpc.api._gather_to_leader, ("x", "w0", canary, {"w0", "w1"})),
    "broadcast": lambda canary: rpc.rpc_sync("w1", rpc.api._broadcast_to_followers, ("x", {"w0": canary})),
}


def _with_torchs_pickler(canary: Canary) -> None:
    with rpc.api._use_rpc_pickler(internal._internal_rpc_pickler):
        rpc.rpc_sync("w1", echo, (canary,))


def _parameter() -> Any:
    return rpc.remote("w1", torch.ones, (2,), {"requires_grad": True})


def _load_state(canary: Canary) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [_parameter()], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": canary}}
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("position", SENT)
def test_no_pickle_in_a_request_is_loaded(position: str, mixed: Cluster, canary: Canary) -> None:
    refused(lambda: SENT[position](canary))
    assert rpc.rpc_sync("w1", double, (1,)) == 2  # the connection goes on


RECEIVED: dict[str, Callable[[str], Any]] = {
    "result": lambda path: rpc.rpc_sync("w0", give_canary, (path,)),
    "result of rpc_async": lambda path: rpc.rpc_async("w0", give_canary, (path,)).wait(),
    "value of a reference": lambda path: rpc.remote("w0", give_canary, (path,)).to_here(),
    "item of a stream": lambda path: list(rpc.stream("w0", canaries, (path,))),
    "result of a map": lambda path: list(rpc.map("w0", give_canary, [path])),
    "exception": lambda path: rpc.rpc_sync("w0", raise_canary, (path,)),
    "exception of a creation": lambda path: rpc.remote("w0", raise_canary, (path,)).to_here(),
    "exception of a map": lambda path: list(rpc.map("w0", raise_canary, [path])),
    "exception of a stream": lambda path: list(rpc.stream("w0", raise_canary, (path,))),
}


@pytest.mark.parametrize("position", RECEIVED)
def test_no_pickle_in_a_reply_is_loaded(position: str, mixed: Cluster, canary: Canary) -> None:
    with mixed[1]:
        refused(lambda: RECEIVED[position](canary.path))
        assert rpc.rpc_sync("w0", double, (1,)) == 2


@pytest.mark.parametrize("kind", [BodyKind.PICKLE, BodyKind.CUSTOM], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tag", Tag, ids=lambda tag: tag.name)
def test_no_pickle_in_a_message_of_telegrad_is_loaded(tag: Tag, kind: BodyKind, mixed: Cluster, canary: Canary) -> None:
    """Send one-way messages of every tag (references, group control), and metadata."""
    engine = mixed[0]._worker.engine
    body, segments = Serializer().dumps(canary)
    engine.send(1, int(tag), int(kind), body, segments)
    engine.send(1, int(tag), int(kind | Flag.METADATA), body, [pickle.dumps(canary)])
    engine.send(1, int(tag), int(Flag.METADATA), pickle.dumps(canary), [pickle.dumps(canary)])
    eventually(doubles)  # after the messages


def doubles() -> bool:
    """Return whether a call reaches the peer; an unreadable message ends a session."""
    try:
        return rpc.rpc_sync("w1", double, (1,), timeout=20) == 2
    except WorkerLost:
        return False


@pytest.mark.parametrize("tag", [Tag.CALL, Tag.GRADIENTS], ids=lambda tag: tag.name)
def test_no_pickle_in_a_raw_request_is_loaded(tag: Tag, mixed: Cluster, canary: Canary) -> None:
    engine = mixed[0]._worker.engine
    body, segments = Serializer().dumps((canary, (), {}))
    for flags in (int(BodyKind.PICKLE), int(BodyKind.CUSTOM), int(BodyKind.PICKLE | Flag.INTERNAL)):
        result = engine.call(1, int(tag), flags, 0, None, body, segments, 20_000_000_000, False, None)
        assert (result[0], result[1]) == (int(Status.REPLIED), int(Tag.ERROR))


def test_values_of_the_store_are_not_unpickled(canary: Canary) -> None:
    store = HashStore()
    with cluster(1, STRICT, store=store, dynamic=True, check=False):
        for key in ("agreement", "service/x", "log/1", "member/0"):
            store.set(key, pickle.dumps(canary))
        with pytest.raises((RuntimeError, ValueError)):
            rpc.get_service("x", timeout=0.01)


def test_the_default_gate_is_that_of_the_worker(mixed: Cluster, canary: Canary) -> None:
    """Torch's pickler loads behind the gate of the worker."""
    data, tensors = internal.serialize(canary)
    with mixed[1], pytest.raises(PickleRefused):
        internal.deserialize(data, tensors)

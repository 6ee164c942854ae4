"""Calls through the native client.

It resolves the worker and the function's name. Python encodes arguments that the codec cannot encode.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, UnknownWorker
from telegrad.rpc.api import _use_rpc_pickler
from telegrad.rpc.internal import _InternalRPCPickler
from telegrad.testing import Cluster, assert_quiescent, cluster
from telegrad.worker.calls.interceptors import of_process


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def worker_name() -> str:
    worker = rpc.get_worker_info()
    return worker.name


def state() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster]:
    with cluster(2, current=None) as group:
        yield group


@pytest.fixture
def w0(group: Cluster) -> Iterator[Any]:
    yield group[0]._worker  # a Worker's own methods make it the current one, which is a context
    for worker in group:
        assert_quiescent(worker)


@pytest.fixture(params=["sync", "async"])
def start(request: pytest.FixtureRequest, w0: Any) -> Any:
    """start(to, function, args, kwargs) -> value"""
    if request.param == "sync":
        return w0.rpc_sync
    return lambda *given, **named: w0.rpc_async(*given, **named).wait()


@pytest.fixture
def only_native(w0: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if Python encodes a call."""

    def refuse(*_: Any) -> None:
        raise AssertionError("Python has encoded a message")

    monkeypatch.setattr(w0.messages, "encode", refuse)


@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_workers(start: Any, to: Any, request: pytest.FixtureRequest) -> None:
    assert start(to, worker_name) == "w1"
    request.getfixturevalue("only_native")
    assert start(to, worker_name) == "w1"


@pytest.mark.parametrize("to", ["w0", 0, rpc.WorkerInfo("w0", 0)])
def test_a_worker_calls_itself(start: Any, to: Any) -> None:
    assert start(to, worker_name) == start(to, worker_name) == "w0"


def test_ranks_of_odd_types(start: Any) -> None:
    class Name(str):
        pass

    assert start(True, worker_name) == start(Name("w1"), worker_name) == "w1"


@pytest.mark.parametrize("to", ["w7", 7, rpc.WorkerInfo("w7", 7)])
def test_unknown_workers(start: Any, to: Any) -> None:
    with pytest.raises(UnknownWorker):
        start(to, worker_name)


@pytest.mark.parametrize("to", [None, 1.0, [], b"w1"])
def test_values_that_are_no_worker_raise(start: Any, to: Any) -> None:
    with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
        start(to, worker_name)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (None, None, ((), {})),
        ((), {}, ((), {})),
        ([], None, ((), {})),
        ((1, 2), None, ((1, 2), {})),
        ([1, [2]], {"k": 3}, ((1, [2]), {"k": 3})),
        (None, {"k": None}, ((), {"k": None})),
    ],
)
def test_forms_of_arguments(start: Any, args: Any, kwargs: Any, expected: Any, request: pytest.FixtureRequest) -> None:
    start("w1", echo)
    request.getfixturevalue("only_native")
    assert start("w1", echo, args, kwargs) == expected


def test_other_forms_of_arguments(start: Any) -> None:
    assert start("w1", echo, torch.Size([1, 2])) == ((1, 2), {})
    tensor = torch.ones(3)
    assert torch.equal(start("w1", echo, (tensor,))[0][0], tensor)
    assert start("w1", echo, (frozenset({1}),)) == ((frozenset({1}),), {})
    with pytest.raises(TypeError):
        start("w1", worker_name, (1,))


def test_torchs_state_is_sent(start: Any) -> None:
    for _ in range(2):
        assert start("w1", state) == (True, False)
        with torch.no_grad():
            assert start("w1", state) == (False, False)
        with torch.autocast("cpu"):
            assert start("w1", state) == (True, True)


def test_a_function_that_is_replaced(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = worker_name
    assert start("w1", old) == start("w1", old) == "w1"
    monkeypatch.setitem(globals(), "worker_name", lambda: "another")
    assert start("w1", old) == "w1"  # by value
    assert start("w1", worker_name) == "another"


def test_a_module_is_sent_by_value(start: Any) -> None:
    import telegrad.testing.waiting as module

    assert start("w1", echo) == ((), {})
    cloudpickle.register_pickle_by_value(module)
    try:
        assert start("w1", echo, (1,)) == ((1,), {})
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class Odd:
    """Callable that is not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> str:
        return "called"


class Interrupting:
    """Callable that is interrupted when first hashed."""

    def __init__(self) -> None:
        self.interruptions = [KeyboardInterrupt("while hashing")]

    def __hash__(self) -> int:
        if self.interruptions:
            raise self.interruptions.pop()
        return 1

    def __call__(self) -> str:
        return "called"


def test_other_callables(start: Any) -> None:
    assert start("w1", Odd()) == "called"
    assert start("w1", lambda: 5) == 5
    assert start("w1", max, (1, 2)) == start("w1", max, (1, 2)) == 2
    function = Interrupting()
    with pytest.raises(KeyboardInterrupt, match="while hashing"):
        start("w1", function)
    assert start("w1", function) == "called"


def test_in_an_event_loop(start: Any, w0: Any) -> None:
    async def main() -> Any:
        return start("w1", worker_name), await w0.rpc_async("w1", worker_name)

    assert asyncio.run(main()) == asyncio.run(main()) == ("w1", "w1")


def test_a_worker_that_is_closed() -> None:
    with cluster(2, current=None, graceful=False) as group:
        w0 = group[0]._worker
        assert w0.rpc_sync("w1", worker_name) == w0.rpc_sync("w1", worker_name) == "w1"
        group[0].shutdown(graceful=False)
        for start in (w0.rpc_sync, w0.rpc_async):
            with pytest.raises(NotInitialized):
                start("w1", worker_name)


def test_own_interceptors_see_every_call(start: Any, w0: Any) -> None:
    assert start("w1", worker_name) == "w1"
    seen: list[object] = []

    def see(call: Any, proceed: Any) -> Any:
        seen.append(call.form.function)
        return proceed(call)

    w0.calls.own_interceptors.add(see)
    assert start("w1", worker_name) == "w1"
    w0.calls.own_interceptors.remove(see)
    assert seen == [worker_name]


def test_torchs_pickler_sees_every_call(start: Any) -> None:
    assert start("w1", worker_name) == "w1"

    class Refusing(_InternalRPCPickler):
        def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
            raise ValueError(f"the pickler was asked for {obj.func.__name__}")

    with _use_rpc_pickler(Refusing()), pytest.raises(ValueError, match="the pickler was asked for worker_name"):
        start("w1", worker_name)


def test_torchs_pickler_encodes_the_function(group: Cluster, start: Any) -> None:
    class Replacing(_InternalRPCPickler):
        def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
            return super().serialize(obj._replace(func=max, args=(1, *obj.args)))

    with _use_rpc_pickler(Replacing()):
        assert start("w1", min, (0, 2)) == 2
        with group[0]:
            assert rpc.remote("w1", min, args=(0, 2)).to_here() == 2


def test_interceptors_of_the_process_see_every_call(start: Any) -> None:
    seen: list[tuple[str, object]] = []

    def see(call: Any, proceed: Any) -> Any:
        seen.append((call.form.mode, call.form.function))
        return proceed(call)

    of_process.add(see)
    try:
        assert start("w1", worker_name) == "w1"
    finally:
        of_process.remove(see)
    assert [function for _, function in seen] == [worker_name]
    assert seen[0][0] in ("sync", "async")


OPEN = threading.Event()


def when_open() -> str:
    assert OPEN.wait(10)
    return "open"


def test_a_timeout_of_the_call(start: Any) -> None:
    OPEN.set()
    assert start("w1", when_open) == start("w1", when_open) == "open"
    OPEN.clear()
    try:
        with pytest.raises(RpcTimeout):
            start("w1", when_open, timeout=0.05)
    finally:
        OPEN.set()

"""`rpc.intercept`: functions around every call, at both ends."""

import asyncio
import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, SerializationError, TelegradError
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster
from telegrad.worker.calls import interception, interceptors

pytestmark = pytest.mark.usefixtures("no_interceptors_left", "clean")


def add(x: Any, y: Any = 1) -> Any:
    return x + y


async def add_later(x: Any, y: Any = 1) -> Any:
    await asyncio.sleep(0)
    return x + y


@async_execution
def add_nested(x: Any, y: Any = 1) -> Any:
    return rpc.rpc_async("w0", add, (x, y))


def fail(text: str) -> None:
    raise KeyError(text)


async def fail_later(text: str) -> None:
    await asyncio.sleep(0)
    raise KeyError(text)


class Counter:
    def __init__(self, total: int = 0) -> None:
        self.total = total

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    async def add_later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)


class Seen(list[Any]):
    """Interceptor that notes calls and their results."""

    def __call__(self, call: rpc.InterceptedCall, proceed: rpc.Proceed, /) -> object:
        future = proceed(call)
        self.append(call)
        return future

    def names(self) -> list[tuple[str, str]]:
        return [(call.kind, call.name) for call in self]


@pytest.fixture
def seen() -> Iterator[Seen]:
    calls = Seen()
    yield calls
    calls.clear()  # they have references


def call(how: str, function: Any, *args: Any) -> Any:
    if how == "sync":
        return rpc.rpc_sync("w1", function, args)
    if how == "async":
        return rpc.rpc_async("w1", function, args).wait()
    if how == "await":
        return asyncio.run(rpc.call("w1", function, args))
    if how == "multicast":
        return rpc.multicast(["w1"], function, args)[0].wait()
    return rpc.remote("w1", function, args).to_here()


WAYS = pytest.mark.parametrize("how", ["sync", "async", "await", "multicast", "remote"])
KINDS = {"sync": "sync", "async": "async", "await": "async", "multicast": "async", "remote": "remote"}


# ---- at the caller


@WAYS
@pytest.mark.parametrize("function", [add, add_later, add_nested])
def test_a_client_interceptor_sees_every_call(how: str, function: Any, seen: Seen) -> None:
    with rpc.intercept(client=seen):
        assert call(how, function, 1, 2) == 3
    assert call(how, function, 1, 2) == 3
    first, *rest = seen
    assert (first.kind, first.peer, first.function, first.args) == (KINDS[how], "w1", function, (1, 2))
    assert first.timeout == rpc.get_rpc_timeout()
    assert first.receiver is None
    assert [each.kind for each in rest] == (["to_here"] if how == "remote" else [])


def test_methods_of_references(seen: Seen) -> None:
    with rpc.intercept(client=seen):
        rref = rpc.remote("w1", Counter, (1,))
        assert rref.rpc_sync().add(1) == 2
        assert rref.rpc_async().add_later(1).wait() == 3
        assert rref.remote().add(1).to_here() == 4
        assert rref.to_here().total == 4
    names = ["Counter", "add", "add_later", "add", "to_here", "to_here"]
    assert seen.names() == list(zip(["remote", "sync", "async", "remote", "to_here", "to_here"], names, strict=True))
    assert seen[1].receiver is rref
    assert seen[0].receiver is None


def test_map_is_one_call_per_chunk(seen: Seen) -> None:
    with rpc.intercept(client=seen):
        assert list(rpc.map("w1", add, range(10), chunk=5)) == list(range(1, 11))
    assert seen.names() == [("map", "add")] * 2
    assert [call.args for call in seen] == [(list(range(5)),), (list(range(5, 10)),)]


@WAYS
def test_arguments_and_function_may_be_changed(how: str) -> None:
    def change(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        if given.kind == "to_here":
            return proceed(given)
        return proceed(dataclasses.replace(given, function=max, args=[1, 5, 3], kwargs={}))

    with rpc.intercept(client=change):
        assert call(how, add, 0) == 5


def test_the_method_may_be_changed() -> None:
    def change(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(dataclasses.replace(given, function="__len__", args=()))

    rref = rpc.remote("w1", list, ([1, 2],))
    with rpc.intercept(client=change):
        assert rref.rpc_sync().count(1) == 2


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_timeout_may_be_changed(how: str) -> None:
    gate = Gate()

    def shorter(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(dataclasses.replace(given, timeout=0.05))

    with rpc.intercept(client=shorter), pytest.raises(RpcTimeout, match="50 ms"):
        call(how, gate.enter)
    gate.open()


@WAYS
def test_the_peer_must_not_be_changed(how: str) -> None:
    def change(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(dataclasses.replace(given, peer="w0"))

    with (
        rpc.intercept(client=change),
        pytest.raises(ValueError, match="changed kind, peer or receiver of the call of add"),
    ):
        call(how, add, 0)


@pytest.mark.parametrize("how", ["sync", "async", "await", "multicast"])
def test_a_result_without_a_call(how: str) -> None:
    with rpc.intercept(client=lambda *_: "cached"):
        assert call(how, fail, "never runs") == "cached"


def test_a_creation_needs_its_call() -> None:
    with rpc.intercept(client=lambda *_: "cached"), pytest.raises(TelegradError, match="without a call of proceed"):
        rpc.remote("w1", add, (1,))

    def twice(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        proceed(given)
        return proceed(given)

    with rpc.intercept(client=twice), pytest.raises(TelegradError, match="called proceed twice"):
        rpc.remote("w1", Counter)


@pytest.mark.parametrize("how", ["sync", "async", "await"])
def test_retries_and_derived_results(how: str) -> None:
    attempts: list[Any] = []

    def retry(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        for attempt in range(3):
            try:
                attempts.append(attempt)
                return proceed(given if attempt == 2 else dataclasses.replace(given, function=fail)).wait()
            except KeyError:
                pass
        return None

    def double(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(given).then(lambda done: 2 * done.value())

    with rpc.intercept(client=double), rpc.intercept(client=retry):
        assert call(how, add, 1) == 4
    assert attempts == [0, 1, 2]


@WAYS
def test_errors_of_calls_and_of_interceptors(how: str) -> None:
    with rpc.intercept(client=Seen()), pytest.raises(KeyError, match="text") as raised:
        call(how, fail, "text")
    assert isinstance(raised.value, RemoteError)

    def refuse(*_: object) -> None:
        raise PermissionError("not today")

    with rpc.intercept(client=refuse), pytest.raises(PermissionError, match="not today"):
        call(how, add, 1)
    with rpc.intercept(client=Seen()), pytest.raises(SerializationError, match="lock"):
        call(how, add, threading.Lock())


def test_interceptors_nest_and_are_removed() -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        def interceptor(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
            order.append(name)
            return proceed(given)

        return interceptor

    outer, inner = rpc.intercept(client=named("outer")), rpc.intercept(client=named("inner"))
    assert rpc.rpc_sync("w1", add, (1,)) == 2
    outer.remove()
    outer.remove()
    assert rpc.rpc_sync("w1", add, (1,)) == 2
    inner.remove()
    assert order == ["outer", "inner", "inner"]


@pytest.mark.parametrize("how", ["sync", "async", "remote"])
@pytest.mark.parametrize("change", ["remove", "add"])
def test_interceptors_that_change_while_a_call_is_encoded(
    two: Cluster, how: str, change: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread changes them just after Python has decided."""
    chain = two[0]._worker.calls.interceptors
    decide = interception.is_intercepted
    decisions: list[bool] = []

    def decide_and_change(calls: Any, form: Any) -> bool:
        decisions.append(decide(calls, form))
        if len(decisions) == 1:
            getattr(chain, change)(seen)
        return decisions[-1]

    if change == "remove":
        chain.add(seen)
    monkeypatch.setattr(interception, "is_intercepted", decide_and_change)
    assert call(how, add, Fraction(1)) == 2  # Python encodes a fraction
    if change == "add":
        chain.remove(seen)
    assert decisions[0] == (change == "remove")
    # It was removed, so it gets what the call that had been given to it still sends; or was added too late.
    assert [given.kind for given in seen if given.kind != "to_here"] == []


def test_other_workers_calls_are_not_intercepted(two: Cluster, seen: Seen) -> None:
    with rpc.intercept(client=seen):
        assert two[1].rpc_sync("w0", add, (1,)) == 2
    assert seen == []


def test_tensors_are_recorded_in_a_context(seen: Seen) -> None:
    with rpc.intercept(client=seen, server=seen), autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("w1", add, (x, x)).sum()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((2,), 2.0))


# ---- at the callee


@WAYS
@pytest.mark.parametrize("function", [add, add_later, add_nested])
def test_a_server_interceptor_sees_every_request(two: Cluster, how: str, function: Any, seen: Seen) -> None:
    with two[1]:
        registration = rpc.intercept(server=seen)
    with registration:
        assert call(how, function, 1, 2) == 3
    assert call(how, function, 1, 2) == 3
    (one,) = seen
    assert (one.kind, one.peer, one.function, one.args) == (
        "remote" if how == "remote" else "call",
        "w0",
        function,
        (1, 2),
    )
    assert 0 < one.timeout <= rpc.get_rpc_timeout()


@pytest.fixture
def serve(two: Cluster) -> Iterator[Any]:
    registrations = []

    def register(interceptor: Any) -> None:
        with two[1]:
            registrations.append(rpc.intercept(server=interceptor))

    yield register
    for registration in registrations:
        registration.remove()


@pytest.mark.parametrize("name", ["add", "add_later"])
def test_methods_are_requests(serve: Any, seen: Seen, name: str) -> None:
    serve(seen)
    rref = rpc.remote("w1", Counter, (1,))
    assert getattr(rref.rpc_sync(), name)(2) == 3
    assert getattr(rref.remote(), name)(2).to_here() == 5
    assert seen.names() == [("remote", "Counter"), ("call", f"Counter.{name}"), ("remote", f"Counter.{name}")]


@WAYS
@pytest.mark.parametrize("function", [add, add_later, add_nested])
def test_server_interceptors_change_arguments_and_results(serve: Any, how: str, function: Any) -> None:
    def change(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(dataclasses.replace(given, args=(10,))).then(lambda done: -done.value())

    serve(change)
    assert call(how, function, 1) == -11


@WAYS
@pytest.mark.parametrize("function", [fail, fail_later])
def test_a_server_interceptor_sees_errors(serve: Any, how: str, function: Any) -> None:
    errors: list[BaseException | None] = []

    def note(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        future: Any = proceed(given)
        future.add_done_callback(lambda _: errors.append(future.failure()))
        return future

    serve(note)
    with pytest.raises(KeyError, match="text") as raised:
        call(how, function, "text")
    assert isinstance(raised.value, RemoteError)
    assert "raise KeyError(text)" in str(raised.value.__cause__)
    assert [type(error) for error in errors] == [KeyError]


@WAYS
def test_a_server_interceptor_refuses_or_answers(serve: Any, how: str) -> None:
    def refuse(given: rpc.InterceptedCall, _: rpc.Proceed) -> object:
        if given.args == (1,):
            raise PermissionError(f"{given.peer} may not call {given.name}")
        return "answer"

    serve(refuse)
    with pytest.raises(PermissionError, match="w0 may not call add"):
        call(how, add, 1)
    assert call(how, add, 2) == "answer"


def test_internal_requests_are_not_intercepted(serve: Any, seen: Seen) -> None:
    serve(seen)
    rref = rpc.remote("w1", add, (1,))
    assert rref._get_type() is int
    assert len(seen) == 1


class Garbage:
    pass


kept: list[Any] = []


def fail_with_garbage() -> None:
    garbage = Garbage()
    kept.append(weakref.ref(garbage))
    raise KeyError(id(garbage))


def test_errors_keep_nothing_alive(serve: Any) -> None:
    serve(Seen())
    with pytest.raises(KeyError):
        rpc.rpc_sync("w1", fail_with_garbage)
    gc.collect()
    assert kept.pop()() is None


# ---- bad input


async def coroutine_interceptor(given: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return await proceed(given)  # type: ignore[misc]


def test_invalid_interceptors(serve: Any) -> None:
    with pytest.raises(ValueError, match="pass client=, server=, or both"):
        rpc.intercept()
    with pytest.raises(TypeError, match="has to be callable, and 1 is not"):
        rpc.intercept(client=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="coroutine_interceptor is an async def"):
        rpc.intercept(server=coroutine_interceptor)
    hidden = lambda *args: coroutine_interceptor(*args)  # noqa: E731
    with rpc.intercept(client=hidden), pytest.raises(TypeError, match="returned a coroutine"):
        rpc.rpc_sync("w1", add, (1,))
    serve(hidden)
    with pytest.raises(TypeError, match="returned a coroutine"):
        rpc.rpc_sync("w1", add, (1,))


def test_registrations_end_with_their_worker() -> None:
    with cluster(2, names="x{}", current=None, graceful=False) as group:
        with group[0]:
            registration = rpc.intercept(client=Seen(), server=Seen())
            assert rpc.rpc_sync("x0", add, (1,)) == 2
        assert_quiescent(group[0])
        group[0].shutdown(graceful=False)
        assert not interceptors.active
        registration.remove()
        with group[0], pytest.raises(NotInitialized):
            rpc.intercept(client=Seen())

"""Headers of calls: from the interceptors of the caller to those of the callee."""

import contextvars
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster

pytestmark = pytest.mark.usefixtures("no_interceptors_left", "clean")

SENT = {"trace": "00-ab", "blob": b"\0\1", "": ""}
tenant: contextvars.ContextVar[object] = contextvars.ContextVar("tenant", default=None)


def add(x: Any, y: Any = 1) -> Any:
    return x + y


async def add_later(x: Any, y: Any = 1) -> Any:
    return x + y


@async_execution
def add_nested(x: Any, y: Any = 1) -> Any:
    return rpc.rpc_async("w1", add, (x, y))


def count(n: int) -> Iterator[int]:
    yield from range(n)


def tenant_here() -> object:
    return tenant.get()


async def tenant_later() -> object:
    return tenant.get()


def send(headers: Any) -> rpc.Interceptor:
    return lambda call, proceed: proceed(dataclasses.replace(call, headers=headers))


@pytest.fixture
def arrived(two: Cluster) -> Iterator[list[tuple[str, dict[str, str | bytes]]]]:
    """Names and headers of the requests that arrive at w1."""
    requests: list[tuple[str, dict[str, str | bytes]]] = []

    def note(call: rpc.InterceptedCall, proceed: rpc.Proceed, /) -> object:
        requests.append((call.name, dict(call.headers)))
        return proceed(call)

    with two[1]:
        registration = rpc.intercept(server=note)
    yield requests
    registration.remove()


@pytest.mark.parametrize("function", [add, add_later, add_nested])
@pytest.mark.parametrize("x", [1, Fraction(1), torch.ones(2)], ids=["codec", "pickle", "tensor"])
def test_headers_arrive_with_calls(arrived: list[Any], function: Any, x: Any) -> None:
    expected = x + 1
    with rpc.intercept(client=send(SENT)):
        results = [
            rpc.rpc_sync("w1", function, (x,)),
            rpc.rpc_async("w1", function, (x,)).wait(),
            rpc.multicast(["w1"], function, (x,))[0].wait(),
            rpc.remote("w1", function, (x,)).to_here(),
        ]
        if not isinstance(x, torch.Tensor):  # the callee would keep the tensor, in case that it is asked again
            results.append(rpc.rpc_sync("w1", function, (x,), retry=rpc.Retry()))
    assert all(torch.equal(r, expected) if isinstance(x, torch.Tensor) else r == expected for r in results)
    assert [entry for entry in arrived if entry[1]] == [(function.__name__, SENT)] * len(results)


def test_headers_arrive_with_streams_maps_and_methods(arrived: list[Any]) -> None:
    counter = rpc.remote("w1", torch.nn.Linear, (2, 2))
    with rpc.intercept(client=send(SENT)):
        assert list(rpc.stream("w1", count, (3,))) == [0, 1, 2]
        assert list(rpc.map(["w1"], add, [1, 2], chunk=2)) == [2, 3]
        assert counter.rpc_sync().extra_repr() == "in_features=2, out_features=2, bias=True"
    assert [entry for entry in arrived if entry[1]] == [(name, SENT) for name in ("count", "add", "Linear.extra_repr")]


def test_headers_arrive_with_references_and_in_autograd_contexts(arrived: list[Any]) -> None:
    x = torch.ones(2, requires_grad=True)
    with rpc.intercept(client=send(SENT)), autograd.context() as context:
        made = rpc.remote("w1", add, (x,))
        loss = rpc.rpc_sync("w1", rpc.RRef.to_here, (made,)).sum()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], torch.ones(2))
    assert [entry[1] for entry in arrived if entry[0] in ("add", "RRef.to_here")] == [SENT] * 2


def test_headers_belong_to_one_call(arrived: list[Any]) -> None:
    with rpc.intercept(client=send(SENT)):
        assert rpc.rpc_sync("w1", add_nested, (1,)) == 2
    assert rpc.rpc_sync("w1", add, (1,)) == 2
    assert arrived == [("add_nested", SENT), ("add", {}), ("add", {})]


def test_headers_without_an_interceptor_at_the_callee_are_ignored() -> None:
    with rpc.intercept(client=send(SENT)):
        assert rpc.rpc_sync("w1", add, (1,)) == 2
        assert rpc.remote("w1", add, (torch.ones(2),)).to_here().tolist() == [2.0, 2.0]
        assert rpc.rpc_sync("w0", add, (1,)) == 2


def test_headers_of_a_call_to_oneself() -> None:
    seen: list[Any] = []

    def note(call: rpc.InterceptedCall, proceed: rpc.Proceed, /) -> object:
        seen.append(dict(call.headers))
        return proceed(call)

    with rpc.intercept(client=send(SENT), server=note):
        assert rpc.rpc_sync("w0", add, (1,)) == 2
    assert seen == [SENT]


def test_handlers_see_the_context_variables_of_interceptors(two: Cluster) -> None:
    def enter(call: rpc.InterceptedCall, proceed: rpc.Proceed, /) -> object:
        token = tenant.set(call.headers.get("tenant"))
        try:
            return proceed(call)
        finally:
            tenant.reset(token)

    with ExitStack() as stack:
        with two[1]:
            registration = rpc.intercept(server=enter)
        stack.callback(registration.remove)
        stack.enter_context(rpc.intercept(client=send({"tenant": "a"})))
        assert rpc.rpc_sync("w1", tenant_here) == "a"
        assert rpc.rpc_sync("w1", tenant_later) == "a"
    assert tenant.get() is None


@pytest.mark.parametrize(
    ("headers", "error", "text"),
    [
        ({"n": 1}, TypeError, "a header of add on w1 has to be a name with a text or bytes, not 'n': 1"),
        ({1: "n"}, TypeError, "not 1: 'n'"),
        ([("n", "1")], TypeError, "the headers of add on w1 have to be a mapping"),
        ({"n": "x" * 65536}, ValueError, "the headers of add on w1 have 65537 bytes, more than the limit of 65536"),
    ],
    ids=["value", "name", "list", "large"],
)
def test_invalid_headers_raise_and_send_nothing(
    arrived: list[Any], headers: Any, error: type[Exception], text: str
) -> None:
    reference = rpc.remote("w1", add, (1,))
    assert reference.to_here() == 2
    before = len(arrived)
    with rpc.intercept(client=send(headers)):
        with pytest.raises(error, match=text):
            rpc.rpc_sync("w1", add, (reference,))
        with pytest.raises(error):
            rpc.remote("w1", add, (reference,))
    assert len(arrived) == before


def test_received_headers_are_read_only(two: Cluster) -> None:
    def change(call: rpc.InterceptedCall, _: rpc.Proceed, /) -> object:
        call.headers["new"] = "x"  # type: ignore[index]
        return None

    with two[1]:
        registration = rpc.intercept(server=change)
    with registration, rpc.intercept(client=send(SENT)), pytest.raises(TypeError, match="does not support item"):
        rpc.rpc_sync("w1", add, (1,))

"""Timeouts per call, by default and without limit; deadlines of nested calls."""

import asyncio
import contextlib
import dataclasses
import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout
from telegrad.rpc import api
from telegrad.testing import Cluster, Gate, Local, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]

NO_TIME_LEFT = r"RPC ran for more than set timeout \(0 ms left\) and .* had passed before this call was sent"
TEXT = r"RPC ran for more than set timeout \((\d+) ms\) and will now be marked with an error"


def echo(x: Any) -> Any:
    return x


@pytest.fixture
def gate() -> Any:
    made = Gate()
    yield made
    made.open()


WAYS = {
    "sync": lambda *a, **k: rpc.rpc_sync("w1", *a, **k),
    "async": lambda *a, **k: rpc.rpc_async("w1", *a, **k).wait(),
    "to self": lambda *a, **k: rpc.rpc_sync("w0", *a, **k),
    "worker": lambda *a, **k: api._worker().rpc_sync("w1", *a, **k),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_names_the_call_and_its_limit(way: str, gate: Gate) -> None:
    begun = time.monotonic()
    with pytest.raises(RpcTimeout, match=TEXT) as caught:
        WAYS[way](gate.enter, timeout=0.1)
    assert 0.09 <= time.monotonic() - begun < 5
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, TimeoutError)
    assert re.search(r"\(100 ms\)", str(caught.value))
    assert "Gate.enter on w" in str(caught.value)
    assert caught.value.timeout == pytest.approx(0.1)
    gate.open()
    assert WAYS[way](echo, (1,)) == 1


def test_the_default_timeout(two: Cluster, gate: Gate) -> None:
    assert rpc.get_rpc_timeout() == 60
    api._set_rpc_timeout(0.1)
    try:
        assert rpc.get_rpc_timeout() == pytest.approx(0.1)
        for timeout in ({}, {"timeout": -1}, {"timeout": -1.0}):
            with pytest.raises(RpcTimeout, match=r"\(100 ms\)"):
                rpc.rpc_sync("w1", gate.enter, **timeout)
        with pytest.raises(RpcTimeout, match=r"\(50 ms\)"):  # the timeout of the call has precedence
            rpc.rpc_sync("w1", gate.enter, timeout=0.05)
    finally:
        api._set_rpc_timeout(60)
    assert rpc.get_rpc_timeout() == 60


def test_the_default_timeout_is_an_option(gate: Gate) -> None:
    with cluster(2, rpc.Options(rpc_timeout=0.1)):
        with pytest.raises(RpcTimeout, match=r"\(100 ms\)"):
            rpc.rpc_sync("w1", gate.enter)
        gate.open()


@pytest.mark.parametrize("endless", [0, 0.0, 1e9, 1e300, float("inf")])
def test_no_limit(endless: float, gate: Gate) -> None:
    api._set_rpc_timeout(0.05)
    try:
        future = rpc.rpc_async("w1", gate.enter, ("late",), timeout=endless)
        gate.wait_for()
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("w1", gate.enter)
        gate.open()
        assert future.wait() == "late"
    finally:
        api._set_rpc_timeout(60)


def test_a_timeout_of_almost_nothing_fails_at_once(gate: Gate) -> None:
    for start in (rpc.rpc_sync, lambda *a, **k: rpc.rpc_async(*a, **k).wait()):
        with pytest.raises(RpcTimeout, match=NO_TIME_LEFT):
            start("w1", gate.enter, timeout=1e-12)


USES: dict[str, Callable[[float], object]] = {
    **{
        name: functools.partial(lambda way, timeout: way(echo, (1,), timeout=timeout), way)
        for name, way in WAYS.items()
    },
    "retry": lambda timeout: rpc.rpc_sync("w1", echo, (1,), None, timeout, retry=rpc.Retry()),
    "call": lambda timeout: asyncio.run(rpc.call("w1", echo, (1,), timeout=timeout)),
    "remote": lambda timeout: rpc.remote("w1", echo, (1,), timeout=timeout),
    "to_here": lambda timeout: rpc.remote("w1", echo, (1,)).to_here(timeout),
    "method": lambda timeout: rpc.remote("w1", list).rpc_sync(timeout).clear(),
    "multicast": lambda timeout: rpc.multicast(["w1"], echo, (1,), timeout=timeout),
    "stream": lambda timeout: rpc.stream("w1", range(3).__iter__, timeout=timeout),
    "map": lambda timeout: rpc.map("w1", echo, [1], timeout=timeout),
    "the default": api._set_rpc_timeout,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("negative", [-2, -0.5])
def test_a_negative_timeout_is_refused(two: Cluster, use: Callable[[float], object], negative: float) -> None:
    with pytest.raises(ValueError, match=rf"0 or more, not {negative}(\.0)? \(0 for no limit, -1 for the default\)"):
        use(negative)


def test_a_negative_timeout_of_an_interceptor_has_expired(gate: Gate) -> None:
    def spend(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(dataclasses.replace(call, timeout=call.timeout - 100))

    with rpc.intercept(client=spend), pytest.raises(RpcTimeout, match=NO_TIME_LEFT):
        rpc.rpc_sync("w1", gate.enter, timeout=60)


def test_a_negative_timeout_has_expired_under_the_drop_in(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.timeouts.is_drop_in", lambda: True)
    with pytest.raises(RpcTimeout, match=NO_TIME_LEFT):
        rpc.rpc_sync("w1", gate.enter, timeout=-2)


def too_late(to: str) -> str:
    """Make a call after the deadline of the request."""
    eventually(rpc.cancelled)
    with pytest.raises(RpcTimeout, match=NO_TIME_LEFT) as caught:
        rpc.rpc_sync(to, echo, (1,))
    texts.append(str(caught.value))
    return texts[-1]


texts: list[str] = []


def test_a_call_after_the_deadline_of_its_request_says_so(two: Cluster) -> None:
    texts.clear()
    with pytest.raises(RpcTimeout, match=r"\(100 ms\)"):
        rpc.rpc_sync("w1", too_late, ("w0",), timeout=0.1)
    eventually(lambda: texts)
    assert "threads" not in texts[0]
    assert "The deadline of the running request, which its calls share, had passed" in texts[0]


def test_an_endless_default(gate: Gate) -> None:
    with cluster(2, rpc.Options(rpc_timeout=float("inf"))):
        future = rpc.rpc_async("w1", gate.enter, (1,))
        gate.open()
        assert future.wait() == 1
    with cluster(2, rpc.Options(rpc_timeout=0)):
        assert rpc.get_rpc_timeout() == 0
        assert rpc.rpc_sync("w1", echo, (1,)) == 1


@pytest.mark.parametrize("nonsense", ["1", None, float("nan"), []])
def test_values_that_are_no_timeout_raise(nonsense: Any) -> None:
    for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            start("w1", echo, (1,), timeout=nonsense)


def test_a_late_reply_is_dropped(gate: Gate) -> None:
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", gate.enter, ("late",), timeout=0.05)
    gate.open()
    assert [rpc.rpc_sync("w1", echo, (i,)) for i in range(50)] == list(range(50))


def test_a_future_times_out_without_a_waiting_thread(gate: Gate) -> None:
    future = rpc.rpc_async("w1", gate.enter, timeout=0.05)
    eventually(future.done)
    with pytest.raises(RpcTimeout):
        future.value()


def test_creation_and_use_of_references(gate: Gate) -> None:
    rref = rpc.remote("w1", gate.enter, ("value",))
    gate.wait_for()
    for use in (lambda: rref.to_here(timeout=0.05), lambda: rref.rpc_sync(timeout=0.05).upper()):
        with pytest.raises(RpcTimeout, match="RPC ran for more than"):
            use()
    gate.open()
    assert rref.to_here() == "value"
    late = Gate()
    rref = rpc.remote("w1", late.enter, timeout=0.05)
    late.wait_for()
    eventually(rref._get_future().done)
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
        rref.to_here()
    late.open()


def test_use_of_a_reference_on_its_owner(gate: Gate) -> None:
    rref = rpc.remote("w0", gate.enter, ("value",))
    gate.wait_for()
    with pytest.raises(RpcTimeout, match=r"\(50 ms\).*the creation of <RRef to a value on w0"):
        rref.to_here(timeout=0.05)
    for use in ("to_here", "local_value"):
        seen = Local([])
        with contextlib.suppress(RpcTimeout):
            rpc.rpc_sync("w0", use_here, (rref, use, seen), timeout=0.1)
        eventually(lambda seen=seen: seen.value)
        assert isinstance(seen.value[0], RpcTimeout)
    gate.open()
    assert rref.to_here() == rref.local_value() == "value"


def use_here(rref: Any, use: str, seen: Any) -> None:
    try:
        getattr(rref, use)()
    except RuntimeError as e:
        seen.value.append(e.with_traceback(None))


# ---- deadlines


def call_on(to: str, *args: Any, timeout: float = -1) -> Any:
    return rpc.rpc_sync(to, *args, timeout=timeout)


def record_completion(to: str, gate: Gate, timeout: float, kind: str) -> None:
    try:
        if kind == "sync":
            rpc.rpc_sync(to, gate.enter, timeout=timeout)
        elif kind == "async":
            rpc.rpc_async(to, gate.enter, timeout=timeout).wait()
        else:
            rpc.remote(to, gate.enter).to_here(timeout=timeout)
    except RuntimeError as e:
        Errors.seen.append(e.with_traceback(None))
        Errors.any.set()


class Errors:
    seen: list[Exception] = []
    any = threading.Event()


@pytest.mark.parametrize("kind", ["sync", "async", "fetch"])
@pytest.mark.parametrize("timeout", [-1, 0, 60])
def test_a_nested_call_ends_with_its_request(kind: str, timeout: float, gate: Gate) -> None:
    Errors.seen.clear()
    Errors.any.clear()
    with contextlib.suppress(RpcTimeout):  # both end at the same time: either may be the first
        rpc.rpc_sync("w1", record_completion, ("w0", gate, timeout, kind), timeout=0.1)
    assert Errors.any.wait(10)
    assert isinstance(Errors.seen[0], RpcTimeout)
    assert Errors.seen[0].timeout <= 0.1


def test_a_shorter_timeout_of_a_nested_call_applies(gate: Gate) -> None:
    with pytest.raises(RpcTimeout, match=r"\(50 ms\)"):
        rpc.rpc_sync("w1", call_on, ("w0", gate.enter), {"timeout": 0.05}, timeout=30)


def ping_pong(depth: int, timeout: float) -> int:
    me = rpc.get_worker_info().id
    return 0 if depth == 0 else 1 + rpc.rpc_sync(1 - me, ping_pong, (depth - 1, timeout), timeout=timeout)


@pytest.mark.parametrize("threads", [1, 4])
def test_deep_ping_pong_with_few_threads(threads: int) -> None:
    """In torch's own RPC both processes hang and the timeout of 5 s never fires."""
    with cluster(2, rpc.Options(num_worker_threads=threads)):
        assert rpc.rpc_sync("w1", ping_pong, (12, 5), timeout=5) == 12
        assert rpc.rpc_sync("w1", ping_pong, (60, 30), timeout=30) == 60
        futures = [rpc.rpc_async("w1", ping_pong, (12, 30), timeout=30) for _ in range(20)]
        assert [f.wait() for f in futures] == [12] * 20


def test_many_timeouts_at_once(gate: Gate) -> None:
    futures = [rpc.rpc_async("w1", gate.enter, timeout=0.05 + 0.001 * (i % 7)) for i in range(200)]
    for future in futures:
        with pytest.raises(RpcTimeout):
            future.wait()
    gate.open()
    assert rpc.rpc_sync("w1", echo, (1,)) == 1


@rpc.functions.async_execution
def calls_on_in_a_callback(way: str, gate: Gate, seen: Any) -> Any:
    def callback(_: Any) -> None:
        gate.enter()
        try:
            rpc.rpc_sync("w0", never_ends, (gate,), timeout=0)
        except RpcTimeout:
            seen.value.append("ended")

    future = rpc.rpc_async("w0", abs, (-1,))
    if way == "then":
        return future.then(callback)
    future.add_done_callback(callback)
    return torch.futures.Future()


def never_ends(gate: Gate) -> None:
    never.wait(20)


never = threading.Event()


@pytest.mark.parametrize("way", ["then", "add_done_callback"])
def test_calls_in_a_callback_end_with_their_request(way: str, gate: Gate) -> None:
    never.clear()
    seen = Local([])
    gate.open()
    with contextlib.suppress(RpcTimeout):  # the reply arrives at that moment
        rpc.rpc_sync("w1", calls_on_in_a_callback, (way, gate, seen), timeout=0.3)
    gate.wait_for()
    eventually(lambda: seen.value == ["ended"])
    never.set()

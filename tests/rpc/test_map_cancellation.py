"""Cancellation of the chunks of `rpc.map`."""

import asyncio
import contextlib
import functools
import gc
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from map_helpers import later

from telegrad import rpc
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rpc import cancellation, chunks
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, Local, eventually

pytestmark = [pytest.mark.usefixtures("clean")]


class Log:
    """Record of what the callee has done, in this process."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.begun = threading.Event()


def waits_at(log: Local[Log], at: int, x: int) -> int:
    log.value.ran.append(x)
    if x == at:
        log.value.begun.set()
        eventually(rpc.cancelled)
        log.value.ran.append("canceled")
    return x


async def sleeps_at(log: Local[Log], at: int, x: int) -> int:
    log.value.ran.append(x)
    if x == at:
        log.value.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.value.ran.append("canceled")
            raise
    return x


@async_execution
def calls_sleeps_at(log: Local[Log], at: int, x: int) -> Any:
    return rpc.rpc_async("w0", sleeps_at, (log, at, x))


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize("how", ["close", "collect", "timeout"])
@pytest.mark.parametrize("function", [waits_at, sleeps_at, calls_sleeps_at])
@pytest.mark.filterwarnings("error")
def test_the_chunks_in_flight_are_canceled(function: Any, how: str, intercepted: bool) -> None:
    log = Log()
    run = functools.partial(function, Local(log), 4)
    with rpc.intercept(client=through) if intercepted else contextlib.nullcontext():
        timeout = 0.5 if how == "timeout" else 0.0  # a busy machine runs the first chunk within it
        results = rpc.map(
            "w1", async_execution(run) if function is calls_sleeps_at else run, range(9), chunk=4, timeout=timeout
        )
        assert [next(results) for _ in range(4)] == list(range(4))
        assert log.begun.wait(10)
        if how == "close":
            results.close()
        elif how == "timeout":
            with pytest.raises(RpcTimeout):
                next(results)
        del results
        eventually(lambda: "canceled" in log.ran, what=f"a cancellation in {log.ran}")


def test_an_error_cancels_the_other_chunks() -> None:
    log = Log()
    local = Local(log)

    def run(x: int) -> int:
        if x == 0:
            assert local.value.begun.wait(10)
            raise KeyError("of an item")
        return waits_at(local, 1, x)

    with pytest.raises(KeyError, match="of an item"):
        list(rpc.map("w1", run, range(2), chunk=1))
    eventually(lambda: "canceled" in log.ran)


@async_execution
def canceled_at(log: Local[Log], x: int) -> Any:
    if x == 0:
        log.value.begun.set()
        eventually(rpc.cancelled)
    return rpc.rpc_async("w0", sleeps_at, (log, x, x))


def starts_and_waits(log: Local[Log], x: int) -> Any:
    eventually(rpc.cancelled)
    return sleeps_at(log, x, x)


@pytest.mark.parametrize("function", [canceled_at, starts_and_waits])
@pytest.mark.filterwarnings("error")
def test_deferred_results_of_a_canceled_chunk_are_canceled(clean: Cluster, function: Any) -> None:
    log = Log()
    run: Any = functools.partial(function, Local(log))
    with pytest.raises(RpcTimeout):
        list(rpc.map("w1", async_execution(run) if function is canceled_at else run, range(3), chunk=3, timeout=0.05))
    eventually(lambda: not any(w._worker.engine.stats()["running_requests"] for w in clean))
    eventually(lambda: not any(w._worker.handlers._deferred for w in clean))
    gc.collect()


def test_a_chunk_that_is_canceled_before_its_coroutines_begin(clean: Cluster) -> None:
    coroutines = [later(1), later(2)]

    async def main() -> None:
        deferred = chunks._DeferredResults(coroutines)
        task = asyncio.create_task(chunks._gather(clean[1]._worker, later, deferred, None, 0))
        del deferred
        await asyncio.sleep(0)  # begins the task, and not those of the coroutines
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.tb  # refers to frames, as a handled error does
        assert [inspect.getcoroutinestate(each) for each in coroutines] == [inspect.CORO_CLOSED] * 2

    asyncio.run(main())


def test_a_canceled_chunk_runs_few_further_items(clean: Cluster) -> None:
    log = Log()
    with pytest.raises(RpcTimeout):
        list(rpc.map("w1", functools.partial(waits_at, Local(log), 500), range(10_000), chunk=10_000, timeout=0.05))
    eventually(lambda: "canceled" in log.ran)
    eventually(lambda: not clean[1]._worker.engine.stats()["running_requests"])
    assert len(log.ran) - log.ran.index("canceled") <= chunks.MOST_IN_SLICE


def test_a_chunk_that_stops_before_its_caller_notices_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "time", SimpleNamespace(monotonic_ns=lambda: 1 << 62))
    monkeypatch.setattr(chunks, "SLICE_TIME", 0)
    with pytest.raises(RpcTimeout):
        list(rpc.map("w1", abs, range(100), chunk=100, timeout=60))


def test_a_reply_with_too_few_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SLICE_TIME", 0)
    monkeypatch.setattr(chunks, "cancelled", lambda: True)
    with pytest.raises(TelegradError, match=r"rpc\.map of abs got 1 results for the 5 items from 0 on"):
        list(rpc.map("w1", abs, range(5), chunk=5))

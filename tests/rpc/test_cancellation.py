"""Cancellation of calls by the caller, by deadlines, and by the caller's loss."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cancellation_helpers import Log

from telegrad import autograd, rpc
from telegrad.errors import Cancelled, RpcTimeout
from telegrad.nn import RemoteModule
from telegrad.rpc import cancellation
from telegrad.testing import Cluster, Gate, Local, assert_quiescent, cluster, eventually, run_all

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def one() -> Iterator[Cluster]:
    """Workers w0 and w1, which runs one request at a time."""
    with cluster(2, rpc.Options(num_worker_threads=1)) as group:
        yield group
        for worker in group:
            assert_quiescent(worker)


def runs(log: Local[Log], *_: object) -> None:
    log.value.begin("ran")


def polls(log: Local[Log]) -> str:
    assert not rpc.cancelled()
    log.value.begin()
    eventually(rpc.cancelled)
    log.value.lines.append("canceled")
    return "dropped"


async def sleeps(log: Local[Log], *_: object) -> None:
    assert not rpc.cancelled()
    log.value.begin()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        log.value.lines.append(f"CancelledError, {rpc.cancelled()}")
        raise
    finally:
        log.value.lines.append("finally")


STOPPED = ("begun", "CancelledError, True", "finally")


async def calls_on(to: str, log: Local[Log]) -> None:
    await rpc.call(to, sleeps, (log,))


@rpc.functions.async_execution
def returns_future_of(to: str, log: Local[Log]) -> Any:
    return rpc.rpc_async(to, sleeps, (log,)).then(lambda done: done.value())


def pending(group: Cluster) -> int:
    return group[0]._worker.engine.stats()["pending_calls"]


# ---- the caller


def test_a_canceled_future(clean: Cluster, log: Log) -> None:
    future = rpc.rpc_async("w1", polls, (log.local,))
    log.wait_for_begin()
    assert not future.cancelled()
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    for read in (future.wait, future.value):
        with pytest.raises(Cancelled, match=r"polls on w1 was canceled") as caught:
            read()
        assert isinstance(caught.value, concurrent.futures.CancelledError)
        assert isinstance(caught.value, RuntimeError)
    assert not future.cancel()  # again
    log.expect("begun", "canceled")


def test_to_cancel_what_has_ended_changes_nothing(clean: Cluster, log: Log) -> None:
    future = rpc.rpc_async("w1", runs, (log.local,))
    assert future.wait() is None
    assert not future.cancel()
    assert not future.cancelled()
    assert future.wait() is None
    failed = rpc.rpc_async("w1", int, ("x",))
    eventually(failed.done)
    assert not failed.cancel()
    with pytest.raises(ValueError, match="invalid literal"):
        failed.wait()


def test_a_function_that_raises_cancelled_is_not_canceled(clean: Cluster) -> None:
    future = rpc.rpc_async("w1", raises_cancelled)
    with pytest.raises(Cancelled, match="by the function"):
        future.wait()
    assert not future.cancelled()


def raises_cancelled() -> None:
    raise Cancelled("by the function")


def test_callbacks_see_the_cancellation(clean: Cluster, log: Log) -> None:
    seen: list[Any] = []
    future = rpc.rpc_async("w1", sleeps, (log.local,))
    child = future.then(lambda done: done.value())
    future.add_done_callback(lambda done: seen.append(done))
    log.wait_for_begin()
    assert child.cancel()  # cancels the call
    assert future.cancelled()
    assert seen == [future]
    with pytest.raises(Cancelled):
        child.wait()
    log.expect(*STOPPED)


def test_waiting_threads_get_it(clean: Cluster, log: Log) -> None:
    future = rpc.rpc_async("w1", sleeps, (log.local,))

    def wait(how: Any) -> bool:
        try:
            how()
        except Cancelled:
            return True
        return False

    def cancel() -> bool:
        log.wait_for_begin()
        return future.cancel()

    waits = [lambda: wait(future.wait), lambda: wait(future.wait), lambda: wait(lambda: rpc.wait_all([future]))]
    assert run_all([*waits, cancel]) == [True] * 4
    log.expect(*STOPPED)


def test_one_thread_of_many_cancels(clean: Cluster, log: Log) -> None:
    future = rpc.rpc_async("w1", sleeps, (log.local,))
    log.wait_for_begin()
    assert sorted(run_all([future.cancel] * 8)) == [False] * 7 + [True]
    log.expect(*STOPPED)


def test_it_races_with_the_reply(clean: Cluster) -> None:
    results = set()
    for i in range(500):
        future = rpc.rpc_async("w1", abs, (-i,))
        for _ in range(i % 100):
            pass
        if future.cancel():
            with pytest.raises(Cancelled):
                future.wait()
            results.add("canceled")
        else:
            assert future.wait() == i
            results.add("value")
    assert "canceled" in results
    eventually(lambda: pending(clean) == 0)


# ---- asyncio


async def in_a_group(log: Log) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(rpc.call("w1", sleeps, (log.local,)))
        await asyncio.to_thread(log.wait_for_begin)
        raise KeyError("from the group's body")


async def in_wait_for(log: Log) -> None:
    async def canceled_soon() -> None:
        await asyncio.to_thread(log.wait_for_begin)
        task.cancel()

    task = asyncio.create_task(rpc.call("w1", sleeps, (log.local,)))
    await canceled_soon()
    await asyncio.wait_for(task, 10)


async def of_a_future(log: Log) -> None:
    async def awaits() -> None:
        await rpc.rpc_async("w1", sleeps, (log.local,))

    task = asyncio.create_task(awaits())
    await asyncio.to_thread(log.wait_for_begin)
    task.cancel()
    await task


@pytest.mark.parametrize("main", [in_a_group, in_wait_for, of_a_future])
def test_a_canceled_await_reaches_the_callee(clean: Cluster, log: Log, main: Any) -> None:
    with pytest.raises((asyncio.CancelledError, BaseExceptionGroup)):
        asyncio.run(main(log))
    log.expect(*STOPPED)


def test_wait_for_that_expires(clean: Cluster, log: Log) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rpc.call("w1", sleeps, (log.local,)), 0.05)

    asyncio.run(main())
    log.expect(*STOPPED)


def test_a_shielded_call_goes_on(clean: Cluster) -> None:
    async def main(gate: Gate) -> Any:
        call = asyncio.ensure_future(rpc.call("w1", gate.enter, (7,)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.01)
        gate.open()
        return await call

    assert asyncio.run(main(Gate())) == 7


# ---- the callee


def test_a_queued_call_never_runs(one: Cluster, log: Log) -> None:
    gate = Gate()
    first = rpc.rpc_async("w1", gate.enter)
    gate.wait_for()
    queued = rpc.rpc_async("w1", runs, (log.local, torch.ones(100_000)))
    eventually(lambda: one[1]._worker.engine.stats()["queued_requests"] == 1)
    assert queued.cancel()
    eventually(lambda: one[1]._worker.engine.stats()["queued_requests"] == 0)  # the first one still runs
    gate.open()
    first.wait()
    rpc.rpc_sync("w1", abs, (1,))
    assert log.lines == []


def test_an_expired_call_never_runs(one: Cluster, log: Log) -> None:
    gate = Gate()
    first = rpc.rpc_async("w1", gate.enter)
    gate.wait_for()
    for call in (rpc.rpc_sync, lambda *a, **k: rpc.rpc_async(*a, **k).wait()):
        with pytest.raises(RpcTimeout, match="runs on w1; queued") as caught:
            call("w1", runs, (log.local,), timeout=0.02)
        assert caught.value.state == "queued"
    gate.open()
    first.wait()
    rpc.rpc_sync("w1", abs, (1,))
    assert log.lines == []


@pytest.mark.parametrize("handler", [polls, sleeps])
def test_an_expired_call_ends_its_handler(clean: Cluster, log: Log, handler: Any) -> None:
    with pytest.raises(RpcTimeout) as caught:
        rpc.rpc_sync("w1", handler, (log.local,), timeout=0.05)
    assert caught.value.state == "running"
    eventually(lambda: log.lines[-1] in ("canceled", "finally"))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let callees find that deadlines have passed before their callers do."""
    monkeypatch.setattr(cancellation, "time", SimpleNamespace(monotonic_ns=lambda: 1 << 62))


def stops_early() -> str:
    return "a part" if rpc.cancelled() else "the whole"


async def stops_early_in_a_coroutine() -> str:
    await asyncio.sleep(0)
    return stops_early()


def stops_early_with_a_reference() -> Any:
    assert rpc.cancelled()
    return rpc.RRef("a part")


@pytest.mark.usefixtures("late", "clean")
@pytest.mark.parametrize("handler", [stops_early, stops_early_in_a_coroutine, stops_early_with_a_reference])
def test_a_part_that_arrives_before_the_caller_notices_the_deadline_is_no_result(handler: Any) -> None:
    with pytest.raises(RpcTimeout) as caught:
        rpc.rpc_sync("w1", handler, timeout=60)
    assert caught.value.state == "running"
    assert rpc.rpc_sync("w1", stops_early, timeout=0) == "the whole"


@pytest.mark.parametrize("handler", [calls_on, returns_future_of])
def test_nested_calls_are_canceled(clean: Cluster, log: Log, handler: Any) -> None:
    future = rpc.rpc_async("w1", handler, ("w0", log.local))
    log.wait_for_begin()
    assert future.cancel()
    log.expect(*STOPPED)


async def refuses(log: Local[Log]) -> str:
    log.value.begin()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        log.value.lines.append("refused")
    await asyncio.sleep(0)  # it is not canceled again
    return "a value that is dropped"


def test_a_coroutine_may_refuse(clean: Cluster, log: Log) -> None:
    future = rpc.rpc_async("w1", refuses, (log.local,))
    log.wait_for_begin()
    future.cancel()
    log.expect("begun", "refused")


def test_outside_of_handlers_nothing_is_canceled(clean: Cluster, log: Log) -> None:
    assert not rpc.cancelled()
    seen: list[bool] = []
    rpc.rpc_async("w1", abs, (1,)).then(lambda _: seen.append(rpc.cancelled())).wait()
    assert seen == [False]
    assert not rpc.rpc_sync("w1", rpc.cancelled)
    assert not rpc.remote("w1", rpc.cancelled).to_here()


# ---- references, autograd, modules


class Owned:
    def __init__(self, gate: Gate | None = None) -> None:
        if gate is not None:
            gate.enter()

    async def sleeps(self, log: Local[Log]) -> None:
        await sleeps(log)

    def polls(self, log: Local[Log]) -> None:
        polls(log)


@pytest.mark.parametrize("method", ["sleeps", "polls"])
def test_methods_through_a_reference(clean: Cluster, log: Log, method: str) -> None:
    owned = rpc.remote("w1", Owned)
    future = getattr(owned.rpc_async(), method)(log.local)
    log.wait_for_begin()
    assert future.cancel()
    eventually(lambda: log.lines[-1] in ("canceled", "finally"))


def test_a_call_that_waits_for_its_receiver_never_runs(clean: Cluster, log: Log) -> None:
    gate = Gate()
    owned = rpc.remote("w1", Owned, (gate,))
    gate.wait_for()
    future = owned.rpc_async().polls(log.local)
    eventually(lambda: clean[1]._worker.engine.stats()["detached_requests"] == 1)
    assert future.cancel()
    with pytest.raises(RpcTimeout) as caught:
        owned.rpc_sync(timeout=0.02).polls(log.local)
    assert caught.value.state == "queued"
    gate.open()
    eventually(lambda: clean[1]._worker.engine.stats()["detached_requests"] == 0)
    assert log.lines == []
    del owned, future, caught


class Module(torch.nn.Module):
    async def forward(self, log: Local[Log]) -> None:
        await sleeps(log)


def test_methods_of_remote_modules(clean: Cluster, log: Log) -> None:
    module: Any = RemoteModule("w1", Module)
    future = module.forward_async(log.local)
    log.wait_for_begin()
    assert future.cancel()
    log.expect(*STOPPED)


def test_a_creation_is_not_canceled(clean: Cluster) -> None:
    gate = Gate()
    made = rpc.remote("w1", gate.enter, ("value",))
    gate.wait_for()
    with pytest.raises(RpcTimeout):
        made.to_here(timeout=0.02)
    gate.open()
    assert made.to_here() == "value"


@pytest.mark.parametrize("in_context", [False, True])
def test_references_and_contexts_of_canceled_requests_end(one: Cluster, log: Log, in_context: bool) -> None:
    gate, x = Gate(), torch.ones(3, requires_grad=True)
    local, theirs = rpc.RRef(torch.ones(2)), rpc.remote("w1", torch.ones, (2,))
    rpc.rpc_sync("w1", abs, (1,))  # the value is made
    first = rpc.rpc_async("w1", gate.enter)
    gate.wait_for()
    argument = x if in_context else 0

    def cancel_calls(*references: object) -> None:
        futures = [rpc.rpc_async("w1", f, (log.local, *references, argument)) for f in (runs, sleeps)]
        assert [future.cancel() for future in futures] == [True, True]

    if in_context:
        with autograd.context():
            cancel_calls(local, theirs)
    else:
        cancel_calls(local, theirs)
    eventually(lambda: one[1]._worker.engine.stats()["queued_requests"] == 0)  # else the first one may run in between
    gate.open()
    first.wait()
    assert log.lines == []
    del local, theirs, first


def test_a_lost_caller(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    with (
        cluster(3, rpc.Options(num_worker_threads=1), graceful=False, check=False) as group,
        caplog.at_level(logging.CRITICAL, "telegrad"),
    ):
        coroutine = group[0].rpc_async("w1", sleeps, (log.local,))
        log.wait_for_begin()
        handler = group[0].rpc_async("w1", polls, (log.local,))
        log.wait_for_begin()
        queued = group[0].rpc_async("w1", runs, (log.local,))
        eventually(lambda: group[1]._worker.engine.stats()["queued_requests"] == 1)
        group[0].shutdown(graceful=False)
        eventually(lambda: "finally" in log.lines and "canceled" in log.lines)
        eventually(lambda: group[1]._worker.engine.stats()["queued_requests"] == 0)
        assert group[2].rpc_sync("w1", abs, (-1,)) == 1
        assert "ran" not in log.lines
        for future in (coroutine, handler, queued):
            with pytest.raises(RuntimeError):
                future.wait()

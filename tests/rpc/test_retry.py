"""Calls with a `Retry`: losses, deadlines, cancellation, errors."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from retry_helpers import FAST, TCP, Counted, break_connections, counted, restart

from telegrad import rpc
from telegrad.errors import Cancelled, NotInitialized, RemoteError, RpcTimeout, UnknownWorker, WorkerLost
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker.calls.retrying import start_retrying


@pytest.fixture
def tcp() -> Iterator[Cluster]:
    with cluster(2, TCP, graceful=False) as group:  # a test may leave no session for the messages of a shutdown
        yield group


def add(x: Any, y: Any = 1) -> Any:
    return x + y


async def add_later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


@rpc.functions.async_execution
def add_elsewhere(x: int) -> Any:
    return rpc.rpc_async("w0", add, args=(x,))


@pytest.mark.parametrize("function", [add, add_later, add_elsewhere, lambda x: x + 1])
def test_without_a_loss_it_is_a_call(clean: Cluster, function: Any) -> None:
    retry = rpc.Retry()
    assert rpc.rpc_sync("w1", function, args=(1,), retry=retry) == 2
    assert rpc.rpc_async(1, function, args=[1], retry=retry).wait() == 2
    assert asyncio.run(rpc.call(clean[1].info, function, args=(1,), retry=retry)) == 2
    assert clean[0].rpc_sync("w1", function, args=(1,), retry=retry) == 2
    assert clean[0].rpc_async("w1", function, args=(1,), retry=retry).then(lambda done: done.value()).wait() == 2
    assert clean[0].debug_info().retries == ()


def test_arguments_and_results(clean: Cluster) -> None:
    retry = rpc.Retry()
    assert rpc.rpc_sync("w1", add, kwargs={"x": [1], "y": [2]}, retry=retry) == [1, 2]
    assert torch.equal(rpc.rpc_sync("w1", torch.add, args=(torch.ones(9000), 1), retry=retry), torch.full((9000,), 2.0))
    rref = rpc.RRef([5])
    assert rpc.rpc_sync("w1", lambda given: given.to_here(), args=(rref,), retry=retry) == [5]
    assert rpc.rpc_sync("w0", add, args=(1,), retry=retry) == 2


def test_the_torch_state_of_the_caller(clean: Cluster) -> None:
    with torch.no_grad():
        assert rpc.rpc_sync("w1", torch.is_grad_enabled, retry=rpc.Retry()) is False


def test_a_broken_connection_runs_the_function_once(tcp: Cluster) -> None:
    of = Counted()
    future = rpc.rpc_async("w1", counted, args=(of.local, "x"), retry=FAST)
    of.wait_for_begin()
    assert break_connections()
    eventually(lambda: "attempt 2 of 5" in str(tcp[0].debug_info().retries))
    assert tcp[0].debug_info().retries[0].startswith("counted on w1 (attempt ")
    of.go_on.set()
    assert future.wait() == (1, "x")
    assert of.runs == 1


def test_a_lost_reply_is_sent_again(tcp: Cluster) -> None:
    of = Counted()
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(tcp[0].rpc_sync("w1", counted, args=(of.local,), retry=FAST))
    )
    thread.start()
    of.wait_for_begin()
    break_connections()
    of.go_on.set()
    thread.join(10)
    assert results == [(1, None)]


def test_a_plain_call_is_not_repeated(tcp: Cluster) -> None:
    of = Counted()
    future = rpc.rpc_async("w1", counted, args=(of.local,))
    of.wait_for_begin()
    break_connections()
    with pytest.raises(WorkerLost):
        future.wait()
    of.go_on.set()
    assert of.runs == 1


def test_a_restarted_worker_runs_the_call() -> None:
    with cluster(2, dynamic=True, check=False) as group:
        of = Counted()
        future = rpc.rpc_async("w1", counted, args=(of.local,), retry=dataclasses.replace(FAST, attempts=50))
        of.wait_for_begin()
        of.go_on.set()
        assert future.wait() == (1, None)
        of.go_on.clear()
        future = rpc.rpc_async("w1", counted, args=(of.local,), retry=rpc.Retry(100, 0.01, 0.05))
        of.wait_for_begin()
        restarting = threading.Thread(target=lambda: restart(group, 1))
        restarting.start()
        eventually(lambda: group[0]._worker.members.lost)
        of.go_on.set()
        restarting.join(20)
        assert future.wait() == (3, None)


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_that_the_group_has_lost_may_come_back(before: bool) -> None:
    with cluster(2, dynamic=True, check=False) as group:
        worker, old = group[0]._worker, group[1]
        retry = rpc.Retry(1000, 0.01, 0.05)
        of = Counted()
        to = old.info if before else "w1"
        if before:  # known to be lost when the call is made
            worker.lose_member(old.info.id, old._worker.incarnation, "it was killed")
            with pytest.raises(WorkerLost, match="it was killed"):
                rpc.rpc_sync(to, counted, args=(of.local,))
        future = rpc.rpc_async(to, counted, args=(of.local,), timeout=0, retry=retry)
        if not before:
            of.wait_for_begin()
            worker.lose_member(old.info.id, old._worker.incarnation, "it was killed")
        eventually(lambda: "(attempt 1 " not in str(group[0].debug_info().retries))
        of.go_on.set()
        restart(group, 1)
        assert future.wait() == (1 if before else 2, None)


def test_attempts_to_a_lost_worker_end() -> None:
    with cluster(2, dynamic=True, check=False) as group:
        group[0]._worker.lose_member(group[1].info.id, group[1]._worker.incarnation, "it was killed")
        with pytest.raises(WorkerLost, match="it was killed") as raised:
            rpc.rpc_sync("w1", add, args=(1,), retry=dataclasses.replace(FAST, attempts=3))
        assert raised.value.__notes__ == ["in attempt 3 of 3 of add on w1"]


def test_attempts_end(tcp: Cluster) -> None:
    of = Counted()
    future = rpc.rpc_async("w1", counted, args=(of.local,), retry=dataclasses.replace(FAST, attempts=2))
    of.wait_for_begin()
    break_connections()
    eventually(lambda: "attempt 2 of 2" in str(tcp[0].debug_info().retries))
    eventually(lambda: break_connections() >= 0 and future.done())
    with pytest.raises(WorkerLost) as raised:
        future.wait()
    assert raised.value.__notes__ == ["in attempt 2 of 2 of counted on w1"]
    of.go_on.set()


def test_the_deadline_covers_all_attempts(tcp: Cluster) -> None:
    of = Counted()
    future = rpc.rpc_async("w1", counted, args=(of.local,), timeout=0.3, retry=FAST)
    of.wait_for_begin()
    break_connections()
    with pytest.raises(RpcTimeout) as raised:
        future.wait()
    assert (raised.value.timeout, raised.value.call) == (0.3, "counted on w1")
    of.go_on.set()


def test_no_pause_goes_beyond_the_deadline(tcp: Cluster) -> None:
    of = Counted()
    retry = rpc.Retry(backoff=1000, max_backoff=1000, jitter=False)
    future = rpc.rpc_async("w1", counted, args=(of.local,), timeout=60, retry=retry)
    of.wait_for_begin()
    break_connections()
    with pytest.raises(WorkerLost):  # at once
        future.wait()
    of.go_on.set()


@pytest.mark.parametrize("pausing", [False, True])
def test_cancellation(tcp: Cluster, pausing: bool) -> None:
    of = Counted()
    retry = rpc.Retry(backoff=1000 if pausing else 0.001, max_backoff=1000, jitter=False)
    future = rpc.rpc_async("w1", counted, args=(of.local,), timeout=0, retry=retry)
    of.wait_for_begin()
    break_connections()
    if pausing:
        eventually(lambda: tcp[0]._worker.timers._waiting)
    else:
        eventually(lambda: "attempt 2" in str(tcp[0].debug_info().retries))
    assert future.cancel()
    assert not future.cancel()
    with pytest.raises(Cancelled, match="counted on w1"):
        future.wait()
    of.go_on.set()
    assert tcp[0].debug_info().retries == ()


def test_awaiting(tcp: Cluster) -> None:
    of = Counted()

    async def ask() -> object:
        task = asyncio.create_task(rpc.call("w1", counted, args=(of.local,), retry=FAST))
        await asyncio.to_thread(of.wait_for_begin)
        break_connections()
        of.go_on.set()
        return await task

    assert asyncio.run(ask()) == (1, None)


class Flaky(Exception):
    pass


def fail_until(runs: Local[list[int]], least: int) -> int:
    runs.value.append(1)
    if len(runs.value) < least:
        raise Flaky("not yet")
    return len(runs.value)


def test_errors_of_the_function_are_raised(clean: Cluster) -> None:
    runs: Local[list[int]] = Local([])
    with pytest.raises(Flaky, match="not yet") as raised:
        rpc.rpc_sync("w1", fail_until, args=(runs, 3), retry=FAST)
    assert isinstance(raised.value, RemoteError)
    assert "run_once" not in str(raised.value.__cause__)
    assert len(runs.value) == 1


def test_errors_of_the_function_that_are_listed(clean: Cluster) -> None:
    runs: Local[list[int]] = Local([])
    retry = dataclasses.replace(FAST, on=(WorkerLost, Flaky))
    assert rpc.rpc_sync("w1", fail_until, args=(runs, 3), retry=retry) == 3


def lose_nested() -> None:
    raise WorkerLost("w7", "as told")


def test_a_loss_within_the_function_is_its_error(clean: Cluster) -> None:
    with pytest.raises(WorkerLost) as raised:
        rpc.rpc_sync("w1", lose_nested, retry=FAST)
    assert isinstance(raised.value, RemoteError)
    assert not hasattr(raised.value, "__notes__") or "attempt" not in str(raised.value.__notes__)


def test_a_number_is_no_policy(clean: Cluster) -> None:
    with pytest.raises(TypeError, match=r"retry has to be a telegrad\.rpc\.Retry"):
        rpc.rpc_sync("w1", add, args=(1,), retry=3)  # type: ignore[call-overload]


def test_an_unknown_worker(clean: Cluster) -> None:
    with pytest.raises(UnknownWorker):
        rpc.rpc_sync("w9", add, args=(1,), retry=FAST)


def test_shutdown_ends_pauses() -> None:
    with cluster(2, TCP, graceful=False) as group:
        of = Counted()
        retry = rpc.Retry(backoff=1000, max_backoff=1000, jitter=False)
        future = rpc.rpc_async("w1", counted, args=(of.local,), timeout=0, retry=retry)
        of.wait_for_begin()
        break_connections()
        eventually(lambda: group[0]._worker.timers._waiting)
        of.go_on.set()
        group[0].shutdown(graceful=False)
        with pytest.raises(NotInitialized, match="counted on w1"):
            future.wait()


def test_interceptors_see_the_function(clean: Cluster) -> None:
    seen: list[tuple[Any, ...]] = []

    def note(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        seen.append((call.kind, call.function, call.args, call.kwargs))
        return proceed(dataclasses.replace(call, args=(call.args[0] + 1,)))

    with rpc.intercept(client=note):
        assert rpc.rpc_sync("w1", add, args=(1,), kwargs={"y": 5}, retry=FAST) == 7
    with clean[1]:
        registration = rpc.intercept(server=note)
    with registration:
        assert rpc.rpc_sync("w1", add, args=(1,), retry=FAST) == 3
    assert seen == [("retry", add, (1,), {"y": 5}), ("retry", add, (1,), {})]


def test_a_handler_may_call_with_a_retry(clean: Cluster) -> None:
    gate = Gate()
    gate.open()
    assert rpc.rpc_sync("w1", lambda: rpc.rpc_sync("w0", add, args=(1,), retry=rpc.Retry())) == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": 1.5}, ValueError),
        ({"backoff": -1}, ValueError),
        ({"max_backoff": float("nan")}, ValueError),
        ({"max_backoff": float("inf")}, ValueError),
        ({"on": ("WorkerLost",)}, TypeError),
        ({"on": KeyboardInterrupt}, TypeError),
    ],
)
def test_wrong_policies(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="Retry"):
        rpc.Retry(**wrong)


def test_pauses() -> None:
    plain = rpc.Retry(backoff=0.1, max_backoff=1, jitter=False)
    assert [plain.pause(attempt) for attempt in (1, 2, 3, 4, 5, 5000)] == [0.1, 0.2, 0.4, 0.8, 1, 1]
    full = rpc.Retry(backoff=0.1, max_backoff=1)
    assert [full.pause(3, lambda share=share: share) for share in (0.0, 0.5, 1.0)] == [0, 0.2, 0.4]  # type: ignore[misc]
    assert rpc.Retry(on=Flaky).on == (Flaky,)  # type: ignore[arg-type]


def test_an_attempt_that_is_due_after_its_worker_has_closed_ends(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(1) as group:
        worker = group[0]._worker
        begun = [start_retrying(worker, "w0", abs, (-1,), None, 0, FAST, pause=1000.0)]
    begun.append(start_retrying(worker, 0, abs, (-1,), None, 0, FAST, pause=0.001))
    for future in begun:
        eventually(future.done)
        with pytest.raises(NotInitialized, match="was pending when this worker shut down"):
            future.wait()


def test_an_error_between_two_attempts_ends_the_call(tcp: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    of = Counted()
    future = rpc.rpc_async("w1", counted, args=(of.local,), retry=FAST)
    of.wait_for_begin()
    monkeypatch.setattr(tcp[0]._worker.timers, "call_later", fails)
    break_connections()
    of.go_on.set()
    eventually(future.done)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        future.wait()

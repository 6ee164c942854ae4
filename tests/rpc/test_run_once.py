"""The callee's part of calls with a `Retry`: what it remembers of them."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from retry_helpers import FAST, TCP, break_connections

from telegrad import rpc
from telegrad.errors import TelegradError
from telegrad.testing import Cluster, Local, cluster, eventually
from telegrad.worker.serving import once
from telegrad.worker.serving.once import RememberedRuns


class Clocked:
    """Runs with a clock and timers that the test sets."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.now = 10.0
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.runs = RememberedRuns(lambda after, run: self.timers.append((after, run)), max_bytes, lambda: self.now)

    def enter(self, key: int, caller: int = 1, window: float = 60.0, deadline: float = math.inf) -> tuple[Any, bool]:
        run, result = self.runs.enter((caller, key), f"f{key}", (7, key), window, deadline)
        return run, result is None

    def done(self, key: int, value: object = None, window: float = 60.0, deadline: float = math.inf) -> None:
        run, begins = self.enter(key, 1, window, deadline)
        assert begins
        self.runs.complete((1, key), run, value, None)

    def settle(self, *open_runs: int) -> None:
        """Let another run begin, whose request lists open runs."""
        self.runs.enter((1, open_runs[-1]), "last", (7, 99), 60.0, math.inf, open_runs)

    def begins(self, key: int) -> bool:
        return self.enter(key)[1]


def test_a_run_begins_once() -> None:
    clocked = Clocked()
    clocked.done(1, "value")
    run, begins = clocked.enter(1)
    assert not begins
    assert run.future.value() == "value"
    assert clocked.begins(2)
    assert clocked.enter(1, caller=2)[1]


def test_runs_are_forgotten_after_the_window() -> None:
    clocked = Clocked()
    clocked.done(1, window=5)
    clocked.done(2, window=60)
    ((after, forget),) = clocked.timers
    assert after == 5
    clocked.now += 5
    forget()
    assert len(clocked.runs) == 1
    (_, (after, forget)) = clocked.timers
    assert after == 55
    clocked.now += 55
    forget()
    assert len(clocked.runs) == 0
    assert clocked.runs._nbytes == 0
    assert len(clocked.timers) == 2
    clocked.done(3)
    assert len(clocked.timers) == 3


def test_results_are_forgotten_at_the_deadline() -> None:
    clocked = Clocked()
    clocked.done(1, deadline=13.0)
    ((after, forget),) = clocked.timers
    assert after == 3
    clocked.now += 3
    forget()
    assert len(clocked.runs) == 0


def test_a_function_that_runs_for_long_is_not_forgotten() -> None:
    clocked = Clocked()
    run, _ = clocked.enter(1, window=5, deadline=13.0)
    clocked.now += 1000
    clocked.runs.forget_expired()
    assert not clocked.begins(1)
    clocked.runs.complete((1, 1), run, "late", None)
    assert clocked.enter(1)[0].future.value() == "late"


def test_the_number_of_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_MOST_RESULTS", 3)
    clocked = Clocked()
    running, _ = clocked.enter(0)
    for key in range(1, 6):
        clocked.done(key)
    assert [clocked.begins(key) for key in (0, 3, 4, 5)] == [False] * 4
    for key in (1, 2):
        with pytest.raises(TelegradError, match=f"the result of f{key} was dropped.* does not run again"):
            clocked.enter(key)
    clocked.runs.complete((1, 0), running, None, None)
    assert not clocked.begins(0)


def test_results_of_settled_runs_are_forgotten() -> None:
    clocked = Clocked()
    for key in (1, 2, 3, 4):
        clocked.done(key, torch.ones(1000))
    clocked.settle(2, 4, 9)
    assert len(clocked.runs) == 3
    assert clocked.runs._nbytes == 2 * (4000 + once._FIXED_BYTES)
    assert [clocked.begins(key) for key in (2, 4, 9)] == [False] * 3
    for key in (1, 3, 8):  # 8: its request is late
        with pytest.raises(TelegradError, match="may have run, and does not run again"):
            clocked.enter(key)
    assert clocked.enter(1, caller=2)[1]
    clocked.settle(10)
    assert list(clocked.runs._runs) == [(1, 9), (2, 1), (1, 10)]  # these have not ended


def test_the_result_of_a_run_that_is_settled_before_its_end_is_not_kept() -> None:
    clocked = Clocked()
    run, _ = clocked.enter(1)
    clocked.settle(2)
    clocked.runs.complete((1, 1), run, torch.ones(1000), None)
    assert list(clocked.runs._runs) == [(1, 2)]
    assert clocked.runs._nbytes == 0


def test_a_run_whose_dropped_result_is_forgotten_does_not_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_MOST_RESULTS", 1)
    monkeypatch.setattr(once, "_MOST_DROPPED", 1)
    clocked = Clocked()
    for key in (1, 2, 3):
        clocked.done(key, deadline=20.0)
    assert len(clocked.runs) == 2
    with pytest.raises(TelegradError, match="may have run, and does not run again"):
        clocked.enter(1)


def test_the_bytes_of_results_are_bounded() -> None:
    clocked = Clocked(max_bytes=10_000)
    clocked.done(1, [torch.ones(1000), "x" * 500])
    clocked.done(2, {"y": torch.ones(1000)})
    clocked.done(3, torch.ones(1000))
    assert [clocked.begins(key) for key in (3, 2)] == [False, False]
    assert (clocked.runs.drops, clocked.runs.nbytes <= 10_000) == (1, True)
    with pytest.raises(TelegradError, match=r"dropped.* 10000 bytes .*retry_results_bytes"):
        clocked.enter(1)
    clocked.done(4, torch.ones(5000))  # too large, but the last one
    assert not clocked.begins(4)
    assert clocked.runs.drops == 3


def test_the_number_of_dropped_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_MOST_RESULTS", 1)
    monkeypatch.setattr(once, "_MOST_DROPPED", 2)
    clocked = Clocked()
    for key in range(1, 6):
        clocked.done(key)
    assert len(clocked.runs) == 3
    for key in (3, 2, 1):
        with pytest.raises(TelegradError):
            clocked.enter(key)
    clocked.now += 60
    clocked.runs.forget_expired()
    assert len(clocked.runs) == 0
    assert clocked.runs._nbytes == 0
    assert not clocked.runs._dropped


def test_a_forgotten_function_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_MOST_ENDED", 2)
    clocked = Clocked()
    for key in range(1, 6):
        clocked.done(key)
    clocked.done(9, deadline=12.0)  # its caller cannot ask again
    clocked.now += 60
    clocked.runs.forget_expired()
    assert len(clocked.runs) == 0
    assert len(clocked.runs._ended) == 2
    for key in range(1, 6):
        with pytest.raises(TelegradError, match=f"forgotten the result of f{key}, .* does not run again"):
            clocked.enter(key)
    assert clocked.begins(6)
    assert clocked.enter(1, caller=2)[1]
    clocked.runs.forget_caller(1)
    assert clocked.begins(1)


def test_an_error_is_remembered() -> None:
    clocked = Clocked()
    run, _ = clocked.enter(1)
    clocked.runs.complete((1, 1), run, None, KeyError("k"))
    with pytest.raises(KeyError):
        clocked.enter(1)[0].future.value()


def test_a_caller_that_is_gone_is_forgotten() -> None:
    clocked = Clocked()
    canceled: list[int] = []
    clocked.done(1)
    run, _ = clocked.enter(2)
    run.cancel = lambda: canceled.append(2)
    other, _ = clocked.enter(2, caller=3)
    clocked.runs.forget_caller(1)
    assert canceled == [2]
    assert run.canceled
    assert not other.canceled
    assert len(clocked.runs) == 2
    assert clocked.begins(1)
    clocked.runs.complete((1, 2), run, "unread", None)
    assert clocked.begins(2)


def test_the_latest_request_names_a_run() -> None:
    clocked = Clocked()
    run, _ = clocked.enter(1)
    assert clocked.runs.functions() == {(7, 1): "f1"}
    clocked.runs.enter((1, 1), "f1", (8, 1), 60.0)
    assert run.request == (8, 1)
    assert clocked.runs.functions() == {(8, 1): "f1"}
    clocked.runs.close()
    assert len(clocked.runs) == 0


# ---- between workers


@pytest.fixture
def tcp() -> Iterator[Cluster]:
    with cluster(2, TCP, graceful=False) as group:  # a test may leave no session for the messages of a shutdown
        yield group


def test_a_worker_remembers_only_calls_with_a_retry(tcp: Cluster) -> None:
    rpc.rpc_sync("w1", max, args=(1, 2))
    assert len(tcp[1]._worker.remembered_runs) == 0
    rpc.rpc_sync("w1", max, args=(1, 2), retry=FAST)
    assert len(tcp[1]._worker.remembered_runs) == 1


def test_a_later_call_lets_results_be_forgotten(tcp: Cluster) -> None:
    runs: Any = tcp[1]._worker.remembered_runs
    for _ in range(5):
        rpc.rpc_sync("w1", torch.ones, args=(1000,), retry=FAST)
        assert len(runs) == 1
    of = Awaited()
    future = rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
    assert of.begun.acquire(timeout=10)
    for _ in range(3):
        rpc.rpc_sync("w1", torch.ones, args=(1000,), retry=FAST)
        assert len(runs) == 2  # that of the coroutine is open
    break_connections()
    eventually(lambda: "attempt 2" in str(tcp[0].debug_info().retries))
    release(tcp, of)
    assert future.wait() == 1


def test_a_failed_run_is_settled_by_the_next_one(tcp: Cluster) -> None:
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("w1", divmod, args=(1, 0), retry=rpc.Retry(3, backoff=0.001, on=(ZeroDivisionError,)))
    rpc.rpc_sync("w1", max, args=(1, 2), retry=FAST)
    assert len(tcp[1]._worker.remembered_runs) == 1
    assert tcp[0]._worker.retries._open_runs == {}


class Awaited:
    """Coroutine function that counts its runs, and waits for the test."""

    def __init__(self) -> None:
        self.runs = 0
        self.canceled = threading.Event()
        self.begun = threading.Semaphore(0)
        self.go_on = asyncio.Event()
        self.local = Local(self)


async def awaited(local: Local[Awaited]) -> int:
    of = local.value
    of.runs += 1
    of.begun.release()
    try:
        await of.go_on.wait()
    except asyncio.CancelledError:
        of.canceled.set()
        raise
    return of.runs


def release(group: Cluster, of: Awaited) -> None:
    loop: Any = group[1]._worker.loop._loop
    loop.call_soon_threadsafe(of.go_on.set)


def test_a_broken_connection_does_not_cancel_a_coroutine(tcp: Cluster) -> None:
    of = Awaited()
    future = rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
    assert of.begun.acquire(timeout=10)
    break_connections()
    eventually(lambda: "attempt 2" in str(tcp[0].debug_info().retries))
    release(tcp, of)
    assert future.wait() == 1
    assert not of.canceled.is_set()


def test_the_caller_cancels_a_coroutine(tcp: Cluster) -> None:
    of = Awaited()
    future = rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
    assert of.begun.acquire(timeout=10)
    assert future.cancel()
    assert of.canceled.wait(10)
    eventually(lambda: len(tcp[1]._worker.remembered_runs) == 0)


def ask_until_canceled(local: Local[list[bool]], begun: Local[threading.Event], go_on: Local[threading.Event]) -> None:
    begun.value.set()
    assert go_on.value.wait(10)
    local.value.append(rpc.cancelled())


@pytest.mark.parametrize("breaks", [True, False])
def test_cancelled_ignores_a_broken_connection(tcp: Cluster, breaks: bool) -> None:
    answers: Local[list[bool]] = Local([])
    begun, go_on = Local(threading.Event()), Local(threading.Event())
    future = rpc.rpc_async("w1", ask_until_canceled, args=(answers, begun, go_on), retry=FAST)
    assert begun.value.wait(10)
    if breaks:
        break_connections()
        eventually(lambda: "attempt 2" in str(tcp[0].debug_info().retries))
    else:
        future.cancel()
        eventually(lambda: tcp[0].debug_info().counts.pending_calls == 0)
        request = tcp[1]._worker.running.snapshot()[0]
        eventually(lambda: tcp[1]._worker.engine.is_canceled(*request.key))
    go_on.value.set()
    eventually(lambda: answers.value == [not breaks])
    if breaks:
        future.wait()
    else:
        eventually(lambda: len(tcp[1]._worker.remembered_runs) == 0)


def attempts(group: Cluster) -> str:
    return str(group[0].debug_info().retries)


def test_a_later_attempt_cancels_the_coroutine_of_the_first(tcp: Cluster) -> None:
    of = Awaited()
    future = rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
    assert of.begun.acquire(timeout=10)
    break_connections()
    eventually(lambda: [call.state for call in tcp[0].debug_info().calls] == ["sent"] and "attempt 2" in attempts(tcp))
    eventually(lambda: len(tcp[1].debug_info().requests) == 1)
    assert not of.canceled.is_set()
    assert future.cancel()
    assert of.canceled.wait(10)
    eventually(lambda: len(tcp[1]._worker.remembered_runs) == 0)
    assert of.runs == 1


def test_a_later_attempt_cancels_the_function_of_the_first(tcp: Cluster) -> None:
    answers: Local[list[bool]] = Local([])
    begun, go_on = Local(threading.Event()), Local(threading.Event())
    future = rpc.rpc_async("w1", ask_until_canceled, args=(answers, begun, go_on), retry=FAST)
    assert begun.value.wait(10)
    break_connections()
    eventually(lambda: "deferred" in [request.state for request in tcp[1].debug_info().requests])
    assert future.cancel()
    runs: Any = tcp[1]._worker.remembered_runs
    eventually(lambda: [run.canceled for run in runs._runs.values()] == [True])
    go_on.value.set()
    eventually(lambda: answers.value == [True])
    eventually(lambda: len(runs) == 0)


def test_the_functions_of_a_worker_that_has_left_are_canceled() -> None:
    with cluster(2, TCP, graceful=False) as group:
        of = Awaited()
        rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
        assert of.begun.acquire(timeout=10)
        rpc.rpc_sync("w1", max, args=(1, 2), retry=FAST)
        assert len(group[1]._worker.remembered_runs) == 2
        group[0].shutdown(graceful=False)
        assert of.canceled.wait(10)
        eventually(lambda: len(group[1]._worker.remembered_runs) == 0)


def test_debug_info_names_the_function(tcp: Cluster) -> None:
    of = Awaited()
    future = rpc.rpc_async("w1", awaited, args=(of.local,), retry=FAST)
    assert of.begun.acquire(timeout=10)
    eventually(lambda: [request.state for request in tcp[1].debug_info().requests] == ["deferred"])
    assert tcp[1].debug_info().requests[0].function == f"{__name__}.awaited"
    assert tcp[0].debug_info().calls[0].function == f"{__name__}.awaited"
    release(tcp, of)
    assert future.wait() == 1


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), "itself", object()], ids=["sparse", "nested", "other"])
def test_a_value_of_unknown_size_is_remembered(value: Any) -> None:
    clocked = Clocked()
    if value == "itself":
        value = []
        value.append(value)
    run, begins = clocked.enter(1)
    assert begins
    clocked.runs.complete((1, 1), run, value, None)
    assert run.future is not None
    assert run.future.value() is value

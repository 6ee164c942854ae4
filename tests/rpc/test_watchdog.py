"""Warnings about handlers that run for long: the option `stuck_handler_timeout`."""

import asyncio
import re
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker import Worker
from telegrad.worker.diagnostics.running import RunningHandlers
from telegrad.worker.diagnostics.watchdog import Watchdog


class Later:
    """Timers whose functions the test runs."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.functions: list[object] = []
        self.fails = False

    def __call__(self, seconds: float, function: object) -> None:
        if self.fails:
            raise RuntimeError("can't start new thread")
        self.delays.append(seconds)
        self.functions.append(function)


class Clocked:
    """Watchdog of a worker with a clock that the test advances."""

    def __init__(self, worker: Worker, timeout: float) -> None:
        self.passed = 0
        self.later = Later()
        running = RunningHandlers(
            worker.pool,
            worker.loop,
            worker.handlers.deferred_requests,
            worker.find_request,
            worker.members.name_of,
            lambda: time.monotonic_ns() + self.passed * 10**9,
        )
        self.watchdog = Watchdog(worker.info.name, timeout, running, self.later)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.name == "telegrad"]
    return [text for text in texts if "longer than stuck_handler_timeout" in text]


def test_a_stuck_handler_is_reported_once(clean: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    clocked, gate = Clocked(clean[1]._worker, 1000), Gate()
    future = rpc.rpc_async("w1", gate.enter)
    assert gate.entered.acquire(timeout=10)
    for seconds in (0, 900, 100, 5, 100):
        clocked.passed += seconds
        clocked.watchdog.check()
        assert len(lines(caplog)) == (1 if clocked.passed >= 1000 else 0)
    (line,) = lines(caplog)
    assert re.match(
        r"worker w1: telegrad\.testing\.waiting\.Gate\.enter, called by w0, has run for 1\d\d\d s on ", line
    )
    assert "in enter\n" in line  # the stack
    assert "_serve" not in line
    gate.open()
    future.wait()


def test_a_time_of_less_than_a_second_is_not_rounded_to_zero(clean: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    clocked, gate = Clocked(clean[1]._worker, 0.001), Gate()
    future = rpc.rpc_async("w1", gate.enter)
    assert gate.entered.acquire(timeout=10)
    eventually(lambda: clocked.watchdog.check() or lines(caplog))
    assert re.search(r"has run for (?!0 s)[\d.]+ s on", lines(caplog)[0])
    gate.open()
    future.wait()


def test_each_handler_is_reported(clean: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    clocked, gate = Clocked(clean[1]._worker, 1000), Gate()
    futures = [rpc.rpc_async("w1", gate.enter) for _ in range(2)]
    for _ in futures:
        assert gate.entered.acquire(timeout=10)
    clocked.watchdog.check()
    assert lines(caplog) == []
    clocked.passed += 1000
    clocked.watchdog.check()
    assert len(lines(caplog)) == 2
    gate.open()
    rpc.wait_all(futures)
    clocked.watchdog.check()
    assert not clocked.watchdog._reported


class Waiting:
    """Coroutines that wait until a test lets them end."""

    def __init__(self, worker: Worker) -> None:
        self.loop = worker.loop
        self.begun = threading.Semaphore(0)
        self.event = asyncio.Event()

    async def inside(self) -> None:
        self.begun.release()
        await self.event.wait()

    async def enter(self) -> None:
        await self.inside()

    def open(self) -> None:
        assert self.loop._loop is not None
        self.loop._loop.call_soon_threadsafe(self.event.set)


async def wait_for(waiting: Local[Waiting]) -> None:
    await waiting.value.enter()


async def block_the_loop(gate: Gate) -> None:
    gate.enter()


@pytest.mark.parametrize("remote", [False, True])
def test_a_coroutine_that_waits_is_reported_once(
    remote: bool, clean: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    clocked, waiting = Clocked(clean[1]._worker, 1000), Local(Waiting(clean[1]._worker))
    future = (rpc.remote if remote else rpc.rpc_async)("w1", wait_for, (waiting,))
    assert waiting.value.begun.acquire(timeout=10)
    for _ in range(3):
        clocked.passed += 500
        clocked.watchdog.check()
        assert len(lines(caplog)) == (1 if clocked.passed >= 1000 else 0)
    (line,) = lines(caplog)
    assert re.match(
        r"worker w1: \S*test_watchdog\.wait_for, called by w0, has waited as a coroutine for 1\d\d\d s on", line
    )
    assert line.index("in wait_for\n") < line.index("in enter\n") < line.index("in inside\n")
    waiting.value.open()
    future.wait() if isinstance(future, torch.futures.Future) else future.to_here()
    eventually(lambda: not clean[1].debug_info().requests)  # the reply leaves before the request ends
    clocked.watchdog.check()
    assert not clocked.watchdog._reported


def test_a_coroutine_that_blocks_the_others_is_reported(clean: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker, gate = clean[1]._worker, Gate()
    clocked, waiting = Clocked(worker, 1000), Local(Waiting(worker))
    waits = rpc.rpc_async("w1", wait_for, (waiting,))
    assert waiting.value.begun.acquire(timeout=10)
    blocks = rpc.rpc_async("w1", block_the_loop, (gate,))
    assert gate.entered.acquire(timeout=10)
    clocked.passed += 1000
    clocked.watchdog.check()
    found = {line.partition(", called")[0].rpartition(".")[2]: line for line in lines(caplog)}
    assert found.keys() == {"wait_for", "block_the_loop"}
    assert "has run for 1000 s on thread telegrad-w1-loop" in found["block_the_loop"]
    assert "in enter\n" in found["block_the_loop"]
    assert "has waited as a coroutine" in found["wait_for"]
    gate.open()
    waiting.value.open()
    rpc.wait_all([waits, blocks])


def test_it_starts_once_and_checks_periodically(clean: Cluster) -> None:
    clocked = Clocked(clean[1]._worker, 8)
    clocked.watchdog.start()
    clocked.watchdog.start()
    assert clocked.later.delays == [2]
    clocked.later.functions.pop()()  # type: ignore[operator]
    assert clocked.later.delays == [2, 2]
    assert Clocked(clean[1]._worker, 300).watchdog._interval == 5


def test_without_a_timeout_nothing_starts(clean: Cluster) -> None:
    clocked = Clocked(clean[1]._worker, 0)
    clocked.watchdog.start()
    assert clocked.later.delays == []


def test_a_thread_that_cannot_be_started_is_tried_again(clean: Cluster) -> None:
    clocked = Clocked(clean[1]._worker, 8)
    clocked.later.fails = True
    clocked.watchdog.start()
    clocked.later.fails = False
    clocked.watchdog.start()
    assert clocked.later.delays == [2]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_option(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with cluster(2, rpc.Options(stuck_handler_timeout=0.02, num_worker_threads=threads)):
        future = rpc.rpc_async("w1", gate.enter)
        # On a busy machine, other handlers may be reported, too.
        eventually(lambda: [line for line in lines(caplog) if "Gate.enter" in line], what="the warning")
        gate.open()
        future.wait()
    assert len([line for line in lines(caplog) if "Gate.enter" in line]) == 1


def test_the_option_for_coroutines(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(2, rpc.Options(stuck_handler_timeout=0.02)) as group:
        waiting = Local(Waiting(group[1]._worker))
        future = rpc.rpc_async("w1", wait_for, (waiting,))
        eventually(lambda: lines(caplog), what="the warning")
        waiting.value.open()
        future.wait()


def test_a_worker_without_handlers_has_no_timer_thread(clean: Cluster) -> None:
    with cluster(2, names="idle{}", current=None):
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("telegrad-idle") and "timers" in name]


def test_answered_requests_are_not_reported(clean: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    clocked = Clocked(clean[1]._worker, 10)
    for _ in range(3):
        rpc.rpc_sync("w1", max, args=(1, 2))
    clocked.passed += 100
    clocked.watchdog.check()
    assert lines(caplog) == []

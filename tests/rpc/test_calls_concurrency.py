"""Calls from many threads, to many workers, nested, and beyond the window."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import _core, rpc
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually, run_all

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]


def echo(x: Any) -> Any:
    return x


class ExitsWhenRead:
    """Result that raises SystemExit when unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def make_exits_when_read() -> ExitsWhenRead:
    return ExitsWhenRead()


def test_a_result_that_exits_when_unpickled_ends_no_thread(two: Cluster) -> None:
    engine = two[0]._worker.engine
    for _ in range(20):
        future = two[0].rpc_async("w1", make_exits_when_read)
        done = threading.Event()
        future.add_done_callback(lambda _, done=done: done.set())  # so that a thread of the pool reads it
        assert done.wait(10)
        assert isinstance(future.failure(), SystemExit)
        future._mark_read()
    assert two[0].rpc_async("w1", echo, (1,)).wait() == 1
    eventually(lambda: engine.stats()["pool_threads"] == len(two[0]._worker.pool.threads()))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(threading.Thread, "start", RuntimeError("can't start new thread")), (_core, "PoolThread", MemoryError())],
    ids=["started", "made"],
)
def test_a_pool_thread_cannot_be_started(
    owner: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request still runs, and a later one starts a thread again."""
    tried = threading.Event()

    def fail(*_: Any) -> None:
        tried.set()
        raise error

    with cluster(2) as fresh:
        engine = fresh[1]._worker.engine
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            few = Gate()
            futures = [fresh[0].rpc_async("w1", few.enter, (i,)) for i in range(4)]
            assert tried.wait(10)
            few.wait_for(1)
        few.open()
        assert [future.wait() for future in futures] == [0, 1, 2, 3]
        many = Gate()
        futures = [fresh[0].rpc_async("w1", many.enter, (i,)) for i in range(8)]
        many.wait_for(8)
        many.open()
        assert [future.wait() for future in futures] == list(range(8))
        eventually(lambda: engine.stats()["pool_threads"] == len(fresh[1]._worker.pool.threads()))
    assert "cannot start another thread" in caplog.text
    caplog.clear()


def test_eight_threads_call_at_once(clean: Cluster) -> None:
    begin = threading.Barrier(8)

    def calls(thread: int) -> None:
        begin.wait(10)
        for i in range(100):
            to = (thread + i) % 2
            match i % 4:
                case 0:
                    assert rpc.rpc_sync(to, echo, ((thread, i),)) == (thread, i)
                case 1:
                    assert rpc.rpc_async(to, echo, ((thread, i),)).wait() == (thread, i)
                case 2:
                    assert rpc.rpc_sync(to, torch.add, (torch.full((3,), float(i)), thread))[0] == i + thread
                case _:
                    assert rpc.remote(to, echo, ((thread, i),)).to_here() == (thread, i)

    worker = clean[0]

    def run(thread: int) -> None:
        with worker:
            calls(thread)

    run_all([lambda thread=thread: run(thread) for thread in range(8)])  # type: ignore[misc]


def test_worker_objects_are_used_by_many_threads(clean: Cluster) -> None:
    def calls(thread: int) -> None:
        worker = clean[thread % 2]
        for i in range(50):
            assert worker.rpc_sync("w1", echo, (i,)) == i
            assert worker.rpc_async("w0", echo, (i,)).wait() == i

    run_all([lambda thread=thread: calls(thread) for thread in range(8)])  # type: ignore[misc]


def worker_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def test_all_to_all(four: Cluster) -> None:
    def calls(rank: int) -> None:
        futures = [(to, rpc.rpc_async(to, worker_name, (torch.ones(100),))) for _ in range(20) for to in range(4)]
        assert all(future.wait() == f"w{to}" for to, future in futures)
        for _ in range(10):
            assert [rpc.rpc_sync(to, worker_name) for to in range(4)] == ["w0", "w1", "w2", "w3"]

    four.on_each(calls)
    for worker in four:
        assert_quiescent(worker)


def tree(depth: int, width: int) -> int:
    """Make `width` nested calls on other workers and wait for all of them."""
    if depth == 0:
        return 1
    me = rpc.get_worker_info().id
    count = len(rpc.api._worker().members.infos())
    futures = [rpc.rpc_async((me + 1 + i) % count, tree, (depth - 1, width)) for i in range(width)]
    return sum(future.wait() for future in futures)


@pytest.mark.parametrize("threads", [1, 2])
def test_nested_calls_always_find_a_thread_in_the_pool(threads: int) -> None:
    with cluster(3, rpc.Options(num_worker_threads=threads)) as group:
        assert rpc.rpc_sync("w1", tree, (4, 3)) == 81
        assert group.on_each(lambda rank: rpc.rpc_sync((rank + 1) % 3, tree, (3, 2))) == [8] * 3


def test_num_worker_threads_limits_concurrent_requests() -> None:
    with cluster(2, rpc.Options(num_worker_threads=3)) as group:
        gate = Gate()
        futures = [rpc.rpc_async("w1", gate.enter, (i,)) for i in range(10)]
        gate.wait_for(3)
        assert not gate.entered.acquire(timeout=0.1)
        assert group[1]._worker.engine.stats()["running_requests"] == 3
        assert group[0].rpc_sync("w0", echo, (1,)) == 1  # the others are not delayed
        gate.open()
        assert [f.wait() for f in futures] == list(range(10))


@pytest.mark.slow
def test_idle_threads_exit() -> None:
    with cluster(2, rpc.Options(num_worker_threads=32)) as group:
        gate = Gate()
        futures = [rpc.rpc_async("w1", gate.enter) for _ in range(32)]
        gate.wait_for(32)
        gate.open()
        torch.futures.wait_all(futures)
        eventually(lambda: group[1]._worker.engine.stats()["pool_threads"] <= 4, timeout=30)


# ---- flow control


def nbytes(x: torch.Tensor) -> int:
    return x.nbytes


def test_requests_larger_than_the_window_pass() -> None:
    with cluster(2, rpc.Options(request_window_bytes=1000)) as group:
        big = torch.zeros(1_000_000)
        assert rpc.rpc_sync("w1", nbytes, (big,)) == big.nbytes
        futures = [rpc.rpc_async("w1", nbytes, (big,)) for _ in range(5)]
        assert torch.futures.wait_all(futures) == [big.nbytes] * 5
        assert rpc.rpc_sync("w1", echo, (big,)).nbytes == big.nbytes  # replies have no window

        def calls(rank: int) -> None:
            futures = [rpc.rpc_async(1 - rank, echo, (torch.full((5000,), float(i)),)) for i in range(20)]
            assert [f.wait()[0].item() for f in futures] == list(range(20))

        group.on_each(calls)
        assert rpc.rpc_sync("w1", rpc.rpc_sync, ("w0", rpc.rpc_sync, ("w1", nbytes, (big,)))) == big.nbytes


def test_senders_wait_for_a_slow_callee() -> None:
    """Unprocessed requests never exceed the window."""
    window = 100_000
    with cluster(2, rpc.Options(request_window_bytes=window, num_worker_threads=1)) as group:
        gate = Gate()
        held = rpc.rpc_async("w1", gate.enter)
        gate.wait_for()
        payload = b"x" * 10_000
        sent: list[Any] = []

        def send() -> None:
            with group[0]:
                for _ in range(100):
                    sent.append(rpc.rpc_async("w1", len, (payload,)))

        sender = threading.Thread(target=send)
        sender.start()
        sender.join(0.3)
        assert sender.is_alive()  # it waits
        assert len(sent) <= 2 * window / len(payload)
        with group[1]:
            assert rpc.rpc_sync("w0", echo, (1,)) == 1  # the other direction is free
        gate.open()
        held.wait()
        sender.join(30)
        assert torch.futures.wait_all(sent) == [len(payload)] * 100


@pytest.mark.slow
@pytest.mark.parametrize("window", [1000, 64 << 20])
def test_a_hundred_thousand_calls_in_flight(window: int) -> None:
    with cluster(2, rpc.Options(request_window_bytes=window)) as group:
        futures = [rpc.rpc_async("w1", echo, (i,)) for i in range(100_000)]
        for i, future in enumerate(futures):
            assert future.wait() == i
        del futures, future
        for worker in group:
            assert_quiescent(worker)


def test_ten_thousand_calls_in_flight_from_a_handler(clean: Cluster) -> None:
    assert rpc.rpc_sync("w1", many, ("w0", 10_000)) == 10_000


def many(to: str, n: int) -> int:
    return len([f.wait() for f in [rpc.rpc_async(to, echo, (i,)) for i in range(n)]])


@pytest.mark.slow
def test_a_hundred_thousand_calls_leave_memory_flat(busy_threads: Callable[[Cluster], set[threading.Thread]]) -> None:
    with cluster(2) as group:
        x = torch.ones(2)

        def rounds(n: int) -> None:
            for i in range(n):
                rpc.rpc_sync("w1", echo, (i,))
                rpc.rpc_sync("w1", echo, (x,))

        rounds(5000)
        before = resident(), len(os.listdir("/proc/self/fd")), busy_threads(group)
        rounds(50_000)
        after = resident(), len(os.listdir("/proc/self/fd"))
        assert after[0] <= before[0] * 1.05
        assert after[1] <= before[1]
        eventually(lambda: busy_threads(group) <= before[2])
        for worker in group:
            assert len(worker._worker.pool.threads()) <= rpc.Options().num_worker_threads
            assert_quiescent(worker)


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1])

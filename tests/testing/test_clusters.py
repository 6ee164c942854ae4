"""`telegrad.testing.cluster`: a group in one process without leaks."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from telegrad import rpc
from telegrad.errors import NotInitialized, WorkerLost
from telegrad.testing import Cluster, Gate, LeakError, Local, ResourceSnapshot, cluster, eventually
from telegrad.worker import live_workers
from telegrad.worker import worker as worker_module

SHORT = 0.1  # s, for what never ends
LONG = 20.0  # s; what takes nearly as long has hung


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    gc.collect()
    before = ResourceSnapshot.now()
    yield
    before.assert_not_grown()
    assert not [worker for worker in live_workers() if not worker.closed]


def here() -> str:
    return rpc.get_worker_info().name


# ---- the group


def test_workers_are_in_the_order_of_their_ranks() -> None:
    with cluster(4) as group:
        assert len(group) == 4
        assert [worker.info.id for worker in group] == [0, 1, 2, 3]
        assert [group[rank].info.name for rank in range(4)] == ["w0", "w1", "w2", "w3"]
        assert group.workers == list(group)
        for worker in group:
            assert [worker.rpc_sync(to, here) for to in range(4)] == ["w0", "w1", "w2", "w3"]


@pytest.mark.parametrize("current", [0, 1, None])
def test_the_current_worker(current: int | None) -> None:
    with cluster(2, current=current):
        if current is None:
            with pytest.raises(NotInitialized):
                here()
        else:
            assert here() == f"w{current}"
    with pytest.raises(NotInitialized):
        here()


def test_names_options_and_store() -> None:
    store = HashStore()
    with cluster(2, rpc.Options(rpc_timeout=7.5), names="worker-{}-of-two", store=store) as group:
        assert group.store is store
        assert [worker.info.name for worker in group] == ["worker-0-of-two", "worker-1-of-two"]
        assert rpc.get_rpc_timeout() == 7.5
        assert rpc.rpc_sync("worker-1-of-two", rpc.get_rpc_timeout) == 7.5


def test_dynamic_groups_grow() -> None:
    with cluster(2, dynamic=True) as group:
        newcomer = rpc.Worker("late", store=group.store)
        assert rpc.rpc_sync("late", here) == "late"
        newcomer.shutdown()
        with pytest.raises(WorkerLost, match="late is lost: it left the group"):
            rpc.rpc_sync("late", here)


def test_workers_communicate_like_processes() -> None:
    """Arguments and results are copies."""
    with cluster(2):
        sent = [torch.zeros(3), [1]]
        came = rpc.rpc_sync("w0", list, (sent,))
        came[0] += 1
        came[1].append(2)
        assert sent[0].sum() == 0
        assert sent[1] == [1]


def test_a_group_that_cannot_form_leaves_no_worker() -> None:
    with pytest.raises(RuntimeError, match="same"), cluster(2, rpc.Options(rpc_timeout=5.0), names="same"):
        pass


# ---- on each


def test_on_each_runs_at_the_same_time_as_that_worker() -> None:
    with cluster(3) as group:
        meeting = threading.Barrier(3, timeout=LONG)

        def meet(rank: int) -> tuple[int, str]:
            meeting.wait()
            return rank, here()

        assert group.on_each(meet) == [(0, "w0"), (1, "w1"), (2, "w2")]


def test_on_each_raises_the_error_of_a_worker() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError(rank)

    with cluster(3) as group, pytest.raises(KeyError, match="1"):
        group.on_each(fail)


def test_on_each_shows_the_worker_that_does_not_end() -> None:
    gate = Gate()

    def hang_here(rank: int) -> None:
        if rank == 1:
            gate.enter()

    with cluster(2) as group:
        with pytest.raises(AssertionError) as caught:
            group.on_each(hang_here, SHORT)
        gate.open()
        assert "run-all-1 did not end" in str(caught.value)
        assert "hang_here" in str(caught.value)
        eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("run-all-")], LONG)


# ---- the end


def test_pending_work_ends_first() -> None:
    gate = Gate()
    with cluster(2) as group:
        cores = [worker._worker for worker in group]
        future = rpc.rpc_async("w1", gate.enter, ("done",))
        gate.wait_for()

        def open_when_it_ends() -> None:
            eventually(lambda: all(core.shutdown_lock.locked() for core in cores), LONG)
            assert not future.done()
            gate.open()

        opener = threading.Thread(target=open_when_it_ends)
        opener.start()
    opener.join()
    assert future.value() == "done"


def test_ungraceful_ends_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
    gate = Gate()
    with cluster(2, graceful=False, check=False):
        future = rpc.rpc_async("w1", gate.enter)
        gate.wait_for()
    with pytest.raises(NotInitialized):
        future.wait()
    gate.open()


def test_the_error_of_the_body_is_raised() -> None:
    """The body's error is raised although its group cannot shut down gracefully."""
    gate, kept = Gate(), []

    def fail(group: Cluster) -> None:
        kept.append(group)
        kept.append(group[0].rpc_async("w1", gate.enter))
        gate.wait_for()
        gate.open()
        raise KeyError("of the body")

    start = time.monotonic()
    with pytest.raises(KeyError, match="of the body"), cluster(2) as group:
        fail(group)
    assert time.monotonic() - start < LONG
    assert len(kept[0]) == 0


@pytest.mark.parametrize("graceful", [True, False])
def test_groups_may_be_ended_within(graceful: bool) -> None:
    with cluster(2) as group:
        workers = list(group)
        group.shutdown() if graceful else group.close()
        assert len(group) == 0
        assert all(worker._worker.closed for worker in workers)
        with pytest.raises(NotInitialized):
            workers[0].rpc_sync("w1", here)


def test_a_failed_shutdown_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 10 * SHORT)  # it takes longer than it waits
    gate = Gate()
    with cluster(2, check=False) as group:
        future = group[0].rpc_async("w1", gate.enter)
        gate.wait_for()
        with pytest.raises(RuntimeError, match=r"graceful shutdown (gave up|failed: other workers timed out)"):
            group.shutdown(SHORT)
    gate.open()
    with pytest.raises((NotInitialized, WorkerLost)):  # whichever of the two was the first to leave
        future.wait()


# ---- leaks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for leaks, which are permanent in these tests."""
    monkeypatch.setattr(ResourceSnapshot, "assert_not_grown", partialmethod(ResourceSnapshot.assert_not_grown, SHORT))


def test_values_kept_by_the_body_are_no_leak() -> None:
    with cluster(2) as group:
        rref = rpc.remote("w1", dict)
        rref.to_here()
        kept: Any = group, list(group), rref, rpc.rpc_async("w1", here), rpc.rpc_sync("w1", torch.ones, (1 << 18,))
        kept[3].wait()
    assert kept[4].sum() == 1 << 18


def test_descriptors_are_a_leak(impatient: None, tmp_path: Path) -> None:
    opened: list[int] = []
    with pytest.raises(LeakError, match=r"descriptors \d+ \(.*/left-open\)"), cluster(2):
        opened.append(os.open(tmp_path / "left-open", os.O_CREAT))
    os.close(opened[0])


def test_children_are_a_leak(impatient: None) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.recv)  # ends when it reads a byte
    with pytest.raises(LeakError, match="child processes"), cluster(2):
        child.start()
    ours.send(None)
    child.join()
    child.close()
    ours.close()
    theirs.close()


def test_running_handlers_are_a_leak(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
    gate, futures = Gate(), []

    def leave_one() -> None:
        with cluster(2, graceful=False):
            futures.append(rpc.rpc_async("w1", gate.enter))
            gate.wait_for()

    with pytest.raises(LeakError, match="threads telegrad-w1-"):
        leave_one()
    gate.open()
    with pytest.raises(NotInitialized):
        futures[0].wait()


def test_check_may_be_left_out(tmp_path: Path) -> None:
    with cluster(2, check=False):
        fd = os.open(tmp_path / "left-open", os.O_CREAT)
    os.close(fd)


def test_alongside_other_workers_only_pending_work_is_checked(tmp_path: Path) -> None:
    with cluster(1, current=None, check=False):
        with cluster(2):
            fd = os.open(tmp_path / "left-open", os.O_CREAT)
        os.close(fd)


def remember(seen: Local[list[str]]) -> None:
    seen.value.append(here())


def test_groups_are_separate() -> None:
    """Two nested groups may have the same names."""
    seen = Local[list[str]]([])
    with cluster(2, check=False) as outer, cluster(2) as inner:
        assert inner.store is not outer.store
        inner[0].rpc_sync("w1", remember, (seen,))
        outer[1].rpc_sync("w0", remember, (seen,))
        assert here() == "w0"
    assert seen.value == ["w1", "w0"]


def test_a_dynamic_group_that_cannot_join_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"taken|not unique"), cluster(2, names="same", dynamic=True):
        pass

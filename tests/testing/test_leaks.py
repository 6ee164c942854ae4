"""`telegrad.testing`: leaks are found and named; pending work is waited for."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Cluster, Gate, LeakError, ResourceSnapshot, assert_quiescent, cluster, leaks
from telegrad.worker import worker as worker_module

SHORT = 0.05  # s, that a leak may take to go, since it will not
LARGE = 1 << 18  # elements


def leaks_of(worker: Any, **how: Any) -> str:
    """Return the leaks that the error names."""
    with pytest.raises(LeakError) as caught:
        assert_quiescent(worker, SHORT, **how)
    said, what = str(caught.value).split(" has left: ")
    assert said == f"worker {worker.info.name}"
    return what


# ---- a worker in use


def test_idle_worker_has_no_leaks(clean: Cluster) -> None:
    assert rpc.rpc_sync("w1", abs, (-1,)) == 1
    for worker in clean:
        assert_quiescent(worker)
        assert_quiescent(worker._worker)


def test_pending_work(clean: Cluster) -> None:
    gate = Gate()
    futures = [rpc.rpc_async("w1", gate.enter) for _ in range(2)]
    gate.wait_for(2)
    assert leaks_of(clean[0], references=False) == "2 pending_calls"
    assert leaks_of(clean[1], references=False) == "2 running_requests"
    gate.open()
    torch.futures.wait_all(futures)


def test_references(clean: Cluster) -> None:
    rref = rpc.remote("w1", dict)
    rref.to_here()
    assert "1 users of references" in leaks_of(clean[0])
    owned = leaks_of(clean[1])
    assert "1 owners of references" in owned
    assert "1 values" in owned
    for worker in clean:
        assert_quiescent(worker, references=False)
    del rref
    for worker in clean:
        assert_quiescent(worker)


def test_pending_creation(clean: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("w1", gate.enter)
    gate.wait_for()
    assert "1 pending creations" in leaks_of(clean[0], references=False)
    gate.open()
    rref.to_here()


def test_received_tensors(clean: Cluster) -> None:
    tensors = rpc.rpc_sync("w1", torch.ones, (LARGE,)), rpc.rpc_sync("w1", torch.ones, (LARGE,))
    assert leaks_of(clean[0]) == "2 buffers in use"
    assert_quiescent(clean[0], references=False)
    del tensors


def test_work_that_ends_in_time_is_no_leak(clean: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter)
    gate.wait_for()
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: gate.open() or collect())  # the check has seen the call by then
    assert_quiescent(clean[0])
    monkeypatch.undo()
    future.wait()


def test_a_reference_cycle_is_no_leak(clean: Cluster) -> None:
    gc.disable()
    try:
        circle: list[Any] = [rpc.rpc_sync("w1", torch.ones, (LARGE,))]
        circle.append(circle)
        del circle
        assert_quiescent(clean[0])
    finally:
        gc.enable()


# ---- a worker that has been shut down


def test_closed_worker_has_no_leaks() -> None:
    with cluster(2) as group:
        worker, rref = group[0], rpc.remote("w1", dict)
        rref.to_here()
    assert_quiescent(worker)


def test_tensors_that_outlive_their_worker() -> None:
    with cluster(2) as group:
        worker, tensor = group[0], rpc.rpc_sync("w1", torch.ones, (LARGE,))
    assert leaks_of(worker) == "1 buffers in use"
    assert_quiescent(worker, references=False)
    del tensor
    assert_quiescent(worker)


def test_abandoned_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
    gate = Gate()
    before = ResourceSnapshot.now()
    with cluster(2, graceful=False, check=False) as group:
        worker = group[1]
        future = rpc.rpc_async("w1", gate.enter)
        gate.wait_for()
    assert leaks_of(worker, references=False) == "1 threads"
    with pytest.raises(LeakError, match="threads telegrad-w1-"):
        before.assert_not_grown(SHORT)
    gate.open()
    assert_quiescent(worker, references=False)
    before.assert_not_grown()
    with pytest.raises(RuntimeError):
        future.wait()


# ---- the process


def grown(before: ResourceSnapshot, **how: Any) -> str:
    with pytest.raises(LeakError) as caught:
        before.assert_not_grown(SHORT, **how)
    said = str(caught.value)
    assert said.startswith("this process has more than before: ")
    return said.removeprefix("this process has more than before: ")


@pytest.fixture
def before() -> Iterator[ResourceSnapshot]:
    """Return the resources at the test's begin, which must equal those at its end."""
    gc.collect()
    footprint = ResourceSnapshot.now()
    yield footprint
    footprint.assert_not_grown()


def test_descriptors_are_named(before: ResourceSnapshot, tmp_path: Path) -> None:
    before.assert_not_grown(0.0)
    fds = sorted(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY) for name in ("one", "two"))
    assert grown(before) == "descriptors " + ", ".join(f"{fd} ({os.readlink(f'/proc/self/fd/{fd}')})" for fd in fds)
    before.assert_not_grown(0.0, fds=False)
    for fd in fds:
        os.close(fd)


def test_descriptors_of_cuda_do_not_count(before: ResourceSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of CUDA opens files of its driver, with eventfds and pipes."""
    ends = [*os.pipe(), os.eventfd(0), os.open("/dev/null", os.O_RDONLY)]
    assert grown(before).startswith("descriptors ")
    real = os.readlink
    as_driver = {str(leaks._FD_FOLDER / str(ends[-1])): "/dev/nvidia0"}
    monkeypatch.setattr(os, "readlink", lambda path: as_driver.get(str(path)) or real(path))
    before.assert_not_grown(0.0)
    ends.append(os.open("/dev/null", os.O_RDONLY))
    assert grown(before) == f"descriptors {ends[-1]} (/dev/null)"
    for fd in ends:
        os.close(fd)


def test_only_open_descriptors_are_counted(before: ResourceSnapshot) -> None:
    """The folder that is open while descriptors are counted does not count."""
    assert all(os.path.lexists(f"/proc/self/fd/{fd}") for fd in before.fds)


def test_fewer_is_no_leak(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        before = ResourceSnapshot.now()
        assert file.fileno() in before.fds
    before.assert_not_grown(0.0)


@pytest.mark.parametrize("name", ["telegrad-of-a-test", "of-another-program"])
def test_threads_of_telegrad_are_named(before: ResourceSnapshot, name: str) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name=name)
    thread.start()
    if name.startswith("telegrad-"):
        assert grown(before) == f"threads {name}"
    else:
        before.assert_not_grown(0.0)
    leave.set()
    thread.join()


def test_threads_that_end_in_time_are_no_leak(before: ResourceSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="telegrad-of-a-test")
    thread.start()
    monkeypatch.setattr(gc, "collect", leave.set)  # the check has seen the thread by then
    before.assert_not_grown()
    monkeypatch.undo()
    thread.join()


def test_children_are_named() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    before = ResourceSnapshot.now()
    child = context.Process(target=theirs.recv)  # ends when it reads a byte
    child.start()
    assert f"child processes {child.pid}" in grown(before)
    assert f"child processes {child.pid}" == grown(before, fds=False)
    ours.send(None)
    child.join()
    child.close()
    ours.close()
    theirs.close()
    before.assert_not_grown()


def test_all_growth_is_reported(before: ResourceSnapshot, tmp_path: Path) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="telegrad-of-a-test")
    thread.start()
    with open(tmp_path / "file", "w") as file:
        assert grown(before) == f"descriptors {file.fileno()} ({file.name}); threads telegrad-of-a-test"
    leave.set()
    thread.join()


def test_a_worker_that_is_not_closed_is_found() -> None:
    """The worker is in a separate process, which would have to close it at exit."""
    program = """
from torch.distributed import HashStore
from telegrad import rpc
from telegrad.testing import ResourceSnapshot, LeakError

before = ResourceSnapshot.now()
worker = rpc.Worker("w0", 0, 1, store=HashStore())
try:
    before.assert_not_grown(0.05)
except LeakError as e:
    print(e)
worker.shutdown()
before.assert_not_grown()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert "descriptors " in ran.stdout
    assert "eventpoll" in ran.stdout
    assert "threads telegrad-w0-1" in ran.stdout

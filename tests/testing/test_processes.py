"""`telegrad.testing.processes`: results by rank, and reports of failed processes."""

import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import ProcessError, Processes, ResourceSnapshot, eventually, processes, run_all

kit = sys.modules[processes.__module__]

# Forked from a process that has imported everything, so each starts in milliseconds.
METHOD = "forkserver"

SHORT = 0.1  # s, for what never ends
LONG = 20.0  # s; what takes nearly as long has hung


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Start the fork server, which starts with the first process and stays."""
    processes(1, rank_of, method=METHOD)


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Check that a test leaves no child process, descriptor or file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before = ResourceSnapshot.now()
    yield
    before.assert_not_grown()
    assert not list(tmp_path.iterdir())


def run(n: int, main: Callable[..., Any], *args: Any, timeout: float = LONG) -> list[Any]:
    return processes(n, main, *args, method=METHOD, timeout=timeout)


def failures(n: int, main: Callable[..., Any], *args: Any) -> dict[int, str]:
    """Return the error's text of each failed process."""
    with Processes(n, main, *args, method=METHOD) as group:
        return failures_of(group, LONG)


def failures_of(group: Processes, timeout: float) -> dict[int, str]:
    with pytest.raises(ProcessError) as caught:
        group.results(timeout)
    found = caught.value.failures
    assert str(caught.value) == "\n".join(f"--- process {rank}: {found[rank]}" for rank in sorted(found))
    return found


def here(init_method: str) -> None:
    """Report to the test that this process has arrived."""
    (Path(init_method.removeprefix("file://")).parent / f"here-{os.getpid()}").touch()


def all_here(tmp_path: Path, n: int) -> None:
    eventually(lambda: len(list(tmp_path.glob("*/here-*"))) == n, LONG)


# ---- results


def rank_of(rank: int, n: int, init_method: str) -> int:
    return rank


def describe(rank: int, n: int, init_method: str, *args: Any) -> tuple[Any, ...]:
    return rank, n, init_method, args, os.getpid()


def add_up(rank: int, n: int, init_method: str) -> float:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))
    total = rpc.rpc_sync(f"w{(rank + 1) % n}", torch.sum, (torch.full((4,), float(rank)),))
    rpc.shutdown()
    return float(total)


def large(rank: int, n: int, init_method: str) -> bytes:
    return bytes(8 << 20)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_each_gets_its_rank_and_the_arguments(method: str) -> None:
    found = processes(2, describe, "a", [1], method=method, timeout=50)
    assert [(rank, n, args) for rank, n, _, args, _ in found] == [(rank, 2, ("a", [1])) for rank in range(2)]
    assert len({init_method for _, _, init_method, _, _ in found}) == 1
    assert len({pid for *_, pid in found} | {os.getpid()}) == 3


def test_groups_of_workers_have_private_addresses() -> None:
    assert run_all([lambda: run(2, add_up)] * 2) == [[0.0, 4.0]] * 2


class Garbage:
    """Object in a cycle that only the process in which it was made may free."""

    def __init__(self) -> None:
        self.itself = self
        self.pid = os.getpid()

    def __del__(self) -> None:
        assert os.getpid() == self.pid


def collect(rank: int, n: int, init_method: str) -> int:
    freed: list[object] = []
    sys.unraisablehook = freed.append
    gc.collect()
    return len(freed)


def test_a_forked_process_does_not_free_the_garbage_of_its_parent() -> None:
    gc.disable()
    try:
        Garbage()
        assert processes(2, collect, method="fork") == [0, 0]
    finally:
        gc.enable()


def test_results_may_be_large() -> None:
    assert [len(result) for result in run(2, large)] == [8 << 20] * 2


def test_zero_processes() -> None:
    assert run(0, rank_of) == []


# ---- failures


def fail_on_one(rank: int, n: int, init_method: str) -> int:
    if rank == 1:
        raise KeyError("of rank one")
    return rank


def exit_on_one(rank: int, n: int, init_method: str) -> int:
    if rank == 1:
        sys.exit("leaving")
    return rank


def test_failing_process_shows_its_error() -> None:
    found = failures(3, fail_on_one)
    assert list(found) == [1]
    assert "Traceback" in found[1]
    assert "fail_on_one" in found[1]
    assert "KeyError: 'of rank one'" in found[1]


def test_an_exit_is_a_failure() -> None:
    assert "SystemExit: leaving" in failures(2, exit_on_one)[1]


def die(rank: int, n: int, init_method: str, how: str) -> None:
    if how == "exit":
        os._exit(5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("kill", -signal.SIGKILL)])
def test_death_is_shown(how: str, code: int) -> None:
    assert failures(2, die, how) == dict.fromkeys(range(2), f"died with exit code {code}")


def bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_death_while_the_result_is_written() -> None:
    with Processes(1, large, method=METHOD) as group:
        eventually(lambda: bytes_in(group._results[0].fileno()) > 1000, LONG)  # it is larger than what a pipe takes
        group.kill(0)
        assert failures_of(group, LONG) == {0: f"died with exit code {-signal.SIGKILL}"}


def unpicklable(rank: int, n: int, init_method: str) -> Any:
    return threading.Lock()


def only_there(rank: int, n: int, init_method: str) -> Any:
    return OnlyThere()


class OnlyThere:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_result_that_cannot_be_sent() -> None:
    assert "cannot pickle '_thread.lock' object" in failures(1, unpicklable)[0]


def test_result_that_cannot_be_unpickled() -> None:
    assert "returned a value that cannot be unpickled here: ValueError" in failures(1, only_there)[0]


def dies_at_exit(rank: int, n: int, init_method: str) -> int:
    """Return, but end with code 9 at exit, as a faulty library may do."""
    multiprocessing.util.Finalize(None, os._exit, args=(9,), exitpriority=100)
    return rank


def test_death_after_the_result_is_a_failure() -> None:
    assert failures(2, dies_at_exit) == dict.fromkeys(range(2), "ended with exit code 9 after its function returned")


def test_main_that_cannot_be_sent() -> None:
    with pytest.raises((AttributeError, TypeError, multiprocessing.ProcessError), match=r"pickle|local"):
        processes(2, lambda rank, n, init_method: rank, method=METHOD)


# ---- hangs


def hang_in_two_threads(rank: int, n: int, init_method: str) -> None:
    begun = threading.Event()
    threading.Thread(target=hang_in_thread, args=(begun,), daemon=True).start()
    begun.wait()
    hang_here(init_method)


def hang_here(init_method: str) -> None:
    here(init_method)
    threading.Event().wait()


def hang_in_thread(begun: threading.Event) -> None:
    begun.set()
    threading.Event().wait()


def test_hang_shows_the_stacks_of_all_threads_of_all_processes(tmp_path: Path) -> None:
    with Processes(3, hang_in_two_threads, method=METHOD) as group:
        all_here(tmp_path, 3)
        for _ in range(2):
            start = time.monotonic()
            found = failures_of(group, SHORT)
            assert time.monotonic() - start < LONG
            assert sorted(found) == [0, 1, 2]
            for text in found.values():
                assert text.startswith("hung, with\n")
                assert "hang_here" in text
                assert "hang_in_thread" in text


def hang_in_a_call(rank: int, n: int, init_method: str) -> None:
    """Hang in the core, with a worker's threads running alongside."""
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))
    rpc.rpc_sync(f"w{(rank + 1) % n}", hang_here, (init_method,), timeout=0)


def test_hang_in_a_remote_call(tmp_path: Path) -> None:
    with Processes(2, hang_in_a_call, method=METHOD) as group:
        all_here(tmp_path, 2)
        found = failures_of(group, SHORT)
    for rank in range(2):
        assert "hang_in_a_call" in found[rank]
        assert "hang_here" in found[rank], "the handler, on a thread of the pool"


def stop(rank: int, n: int, init_method: str) -> None:
    here(init_method)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_hang_without_stacks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "_STACKS_BEGIN", SHORT)
    with Processes(2, stop, method=METHOD) as group:
        all_here(tmp_path, 2)
        start = time.monotonic()
        found = failures_of(group, SHORT)
        assert time.monotonic() - start < LONG
    assert "no stacks: the process is stopped" in found[0]
    assert "no stacks: the process is stopped" in found[1]


class ComesLate:
    """Object that keeps its process from reaching its function."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def __reduce__(self) -> Any:
        return hang_here, (f"file://{self._where}/late/store",)


def test_hang_before_its_function(tmp_path: Path) -> None:
    """The signal for the stacks does not end the process."""
    (tmp_path / "late").mkdir()
    with Processes(1, rank_of, ComesLate(tmp_path), method=METHOD) as group:
        all_here(tmp_path, 1)
        assert failures_of(group, SHORT) == {
            0: "hung, with\nno stacks: the process is stopped, or has not reached its function"
        }
        os.kill(group.pids[0], 0)
    shutil.rmtree(tmp_path / "late")


def fail_or_hang(rank: int, n: int, init_method: str) -> int:
    if rank == 0:
        hang_here(init_method)
    eventually(lambda: list(Path(init_method.removeprefix("file://")).parent.glob("here-*")), LONG)
    return int("no number")


def test_processes_that_wait_for_a_failed_one_are_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "_AFTER_FAILURE", SHORT)
    start = time.monotonic()
    with Processes(2, fail_or_hang, method=METHOD) as group:
        found = failures_of(group, 10 * LONG)
    assert time.monotonic() - start < 2 * LONG
    assert "hang_here" in found[0]
    assert "ValueError" in found[1]


def leave_a_thread(rank: int, n: int, init_method: str) -> int:
    begun = threading.Event()
    threading.Thread(target=hang_in_thread, args=(begun,)).start()
    begun.wait()
    return rank


def test_process_that_does_not_end_after_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "_GOODBYE", SHORT)
    text = failures(1, leave_a_thread)[0]
    assert text.startswith("did not end after its function returned, with\n")
    assert "hang_in_thread" in text


# ---- running ones


def hang_or_return(rank: int, n: int, init_method: str, hangs: int) -> int:
    if rank == hangs:
        hang_here(init_method)
    return rank


def test_processes_may_be_killed() -> None:
    with Processes(3, hang_or_return, 1, method=METHOD) as group:
        assert len(set(group.pids)) == 3
        assert group.results(LONG, ranks=[2, 0]) == [2, 0]
        group.kill(1)
        with pytest.raises(ProcessError, match=f"process 1: died with exit code {-signal.SIGKILL}"):
            group.results(LONG, ranks=[1])


def fail_with(group: Processes) -> None:
    with group:
        raise KeyError(group.pids)


def rank_or_raise(rank: int, _n: int, _init_method: str) -> int:
    if rank == 1:
        raise ValueError("on purpose")
    return rank


def test_results_may_be_asked_for_again() -> None:
    with Processes(3, rank_or_raise, method=METHOD) as group:
        assert group.results(LONG, ranks=[0]) == [0]
        assert group.results(LONG, ranks=[2, 0]) == [2, 0]
        for _ in range(2):
            assert list(failures_of(group, LONG)) == [1]


def test_all_are_killed_at_the_end() -> None:
    with pytest.raises(KeyError) as caught:
        fail_with(Processes(2, hang_in_two_threads, method=METHOD))
    for pid in caught.value.args[0]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

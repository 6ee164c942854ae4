"""Processes that fork while they have a worker.

The children have no worker, keep nothing of the parent's, and cannot harm it.
"""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_helpers import (
    TIMEOUT,
    Actor,
    actors,
    begin_calls,
    call,
    call_many,
    failure,
    failures_of_calls,
    hang,
    shut_all_down,
    state,
)

from telegrad import rpc
from telegrad.errors import NotInitialized

AT_ONCE = 3.0  # s; milliseconds unless the machine is busy


@pytest.fixture
def two(tmp_path: Path) -> Any:
    with actors(2, tmp_path) as group:
        yield group


# ---- steps


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def load_data(to: str, workers: int) -> int:
    """Use a DataLoader with forked workers between remote calls."""
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=workers, multiprocessing_context="fork")
    total = 0
    for batch in loader:
        total += int(rpc.rpc_sync(to, torch.sum, (batch,), timeout=TIMEOUT))
    return total


def square(x: int) -> int:
    return x * x


def errors_in_child(_: int) -> list[str]:
    """Return the errors of calls in a child."""
    return [failure(use)[0] for use in (lambda: rpc.rpc_sync("w0", abs, (-1,)), rpc.shutdown)]


def use_pool(function: Callable[[int], Any]) -> list[Any]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(function, range(4))


def fork_sleeper() -> int:
    """Fork a child that stays alive."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def fork_during_calls(to: str, count: int) -> int:
    """Fork while calls are pending in other threads."""
    stop = threading.Event()
    right = [0]

    def calls() -> None:
        while not stop.is_set():
            right[0] += bool(rpc.rpc_sync(to, torch.add, (torch.ones(2), 1), timeout=TIMEOUT).sum() == 4)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    ends = 0
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(number)
        ends += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    assert right[0] > 0
    return ends


def drop_reference_in_child(owner: str) -> int:
    """The child's copy of a reference ends with the child, and is not counted."""
    rref = rpc.remote(owner, dict)
    rref.to_here()
    pid = os.fork()
    if pid == 0:
        try:
            del rref
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert rref.rpc_sync(timeout=TIMEOUT).__len__() == 0
    return code


def use_reference_in_child() -> str:
    state["rref"] = rpc.remote("w1", dict)
    state["rref"].to_here()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return str(pool.apply(_use_reference))


def _use_reference() -> str:
    return failure(lambda: state["rref"].rpc_sync().__len__())[0]


def touch_engine_in_child(to: str) -> list[Any]:
    """Use the inherited worker in a child, while a call of the parent is pending."""
    state["future"] = rpc.rpc_async(to, hang, timeout=0)
    state["agent"] = rpc.api._get_current_rpc_agent()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return [pool.apply(step) for step in (_wait, _count, _close)]


def _wait() -> str:
    return failure(state["future"].wait)[0]


def _count() -> str:
    return str(state["agent"].get_debug_info()["agent.client_active_calls"])


def _close() -> str:
    state["agent"].worker.close()
    return str(state["agent"].worker.closed)


def count_later() -> Iterator[int]:
    time.sleep(2)  # until the child has read
    yield from range(3)


def await_in_child(to: str) -> list[Any]:
    """Wait in a child for pending work of the parent, which no thread completes."""
    state["streams"] = [rpc.stream(to, count_later) for _ in range(2)]
    state["future"] = rpc.rpc_async(to, time.sleep, (2,))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        steps = (_next, _anext, _await, _await_then, _wait_then)
        found = [pool.apply_async(step).get(TIMEOUT) for step in steps]
    state["future"].wait()
    return [*found, *map(list, state["streams"])]


def _next() -> str:
    return failure(lambda: next(state["streams"][0]))[0]


def _anext() -> str:
    async def main() -> None:
        await anext(state["streams"][1])

    return failure(lambda: asyncio.run(main()))[0]


def _await() -> str:
    async def main() -> None:
        await state["future"]

    return failure(lambda: asyncio.run(main()))[0]


def _await_then() -> str:
    async def main() -> None:
        await state["future"].then(id)

    return failure(lambda: asyncio.run(main()))[0]


def _wait_then() -> str:
    return failure(lambda: state["future"].then(id).wait())[0]


def join_in_child(where: str) -> list[int]:
    """A child may have its own worker."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return [pool.apply(_alone, (f"{where}-{number}",)) for number in range(2)]


def _alone(where: str) -> int:
    rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=rpc.Options(init_method=f"file://{where}"))
    value = int(rpc.rpc_sync("child", abs, (-7,), timeout=TIMEOUT))
    rpc.shutdown()
    return value


# ---- tests


def test_data_loader(two: list[Actor]) -> None:
    steps = [actor.begin(load_data, other.name, 2) for actor, other in zip(two, reversed(two), strict=True)]
    assert [step.result() for step in steps] == [sum(range(40))] * 2
    shut_all_down(two)


def test_pool(two: list[Actor]) -> None:
    two[0].do(call_many, "w1", 3)
    assert two[0].do(use_pool, square) == [0, 1, 4, 9]
    assert two[0].do(use_pool, errors_in_child) == [["NotInitialized"] * 2] * 4
    for a, b in ((0, 1), (1, 0)):
        assert two[a].do(call_many, f"w{b}", 10) == 10
    shut_all_down(two)
    assert [actor.stderr() for actor in two] == ["", ""]


def test_a_child_does_not_wait_for_work_of_its_parent(two: list[Actor]) -> None:
    assert two[0].do(await_in_child, "w1") == [*["NotInitialized"] * 5, [0, 1, 2], [0, 1, 2]]
    shut_all_down(two)


def test_handler_forks(two: list[Actor]) -> None:
    assert two[0].do(call, "w1", use_pool, square) == [0, 1, 4, 9]
    assert two[0].do(call, "w1", use_pool, errors_in_child) == [["NotInitialized"] * 2] * 4
    assert two[0].do(call_many, "w1", 10) == two[1].do(call_many, "w0", 10) == 10
    shut_all_down(two)


def test_forks_while_calls_are_pending(two: list[Actor]) -> None:
    """A thread with the GIL must not wait for a lock that a fork holds."""
    calls = two[1].begin(call_many, "w0", 1000)
    assert two[0].do(fork_during_calls, "w1", 20) == 20
    assert calls.result() == 1000
    shut_all_down(two)


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_death_of_a_parent_is_noticed_while_its_child_lives(two: list[Actor], how: str) -> None:
    two[0].do(call_many, "w1", 3)
    child = two[1].do(fork_sleeper)
    try:
        two[0].do(begin_calls, "w1", hang, 1)
        began = time.monotonic()
        if how == "exits":
            assert two[0].do(failure, call, "w1", os._exit, 3)[0] == "WorkerLost"
        else:
            two[1].end()
        when, failures = two[0].do(failures_of_calls)
        assert when - began < AT_ONCE
        assert [kind for kind, _ in failures] == ["WorkerLost"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_references_in_a_child(two: list[Actor]) -> None:
    assert two[0].do(drop_reference_in_child, "w1") == 0
    assert two[0].do(use_reference_in_child) in (NotInitialized.__name__, "RRefDeleted")
    shut_all_down(two)


def test_a_child_touches_nothing_of_the_engine(two: list[Actor]) -> None:
    """The locks of the parent's engine stay locked in a child."""
    assert two[0].do(touch_engine_in_child, "w1") == [NotInitialized.__name__, "0", "True"]
    assert two[0].do(call_many, "w1", 3) == 3


def test_child_with_a_worker_of_its_own(two: list[Actor], tmp_path: Path) -> None:
    two[0].do(call_many, "w1", 3)
    assert two[0].do(join_in_child, str(tmp_path / "child")) == [7, 7]
    assert two[0].do(call_many, "w1", 3) == 3
    shut_all_down(two)


def test_a_child_that_runs_to_its_exit(tmp_path: Path) -> None:
    """At its exit the interpreter frees inherited objects, but not the engine."""
    program = f"""
import os, sys
from telegrad import rpc

rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=rpc.Options(init_method="file://{tmp_path}/store"))
assert rpc.rpc_sync("w0", abs, (-1,)) == 1
pid = os.fork()
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert rpc.rpc_sync("w0", abs, (-1,)) == 1
rpc.shutdown()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- children that leave their handler


def fork_and(how: str) -> int:
    """Fork in a handler; the child leaves the handler in the given way."""
    pid = os.fork()
    if pid == 0:
        end(how)
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def fork_later_and(how: str) -> int:
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        if how == "await":
            await asyncio.sleep(0)
        end(how)
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("in the child")
    if how == "exit":
        sys.exit(3)
    if how == "say":
        sys.exit("in the child")


class Forks:
    def fork_and(self, how: str) -> int:
        return fork_and(how)


def fork_by_method(to: str, how: str) -> int:
    forks = rpc.remote(to, Forks)
    return int(forks.rpc_sync(timeout=TIMEOUT).fork_and(how))


def fork_by_remote(to: str, how: str) -> int:
    return int(rpc.remote(to, fork_and, (how,)).to_here(TIMEOUT))


def fork_from_here(to: str, function: Callable[[str], Any], how: str) -> int:
    return int(rpc.rpc_sync(to, function, (how,), timeout=TIMEOUT))


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("say", 1), ("return", 0)])
def test_a_child_of_a_handler_ends_with_it(two: list[Actor], how: str, code: int) -> None:
    """The child sends no reply, and its parent is not affected."""
    for function in (fork_and, fork_later_and):
        assert two[0].do(fork_from_here, "w1", function, how) == code
    assert two[0].do(fork_by_method, "w1", how) == code
    assert two[0].do(fork_by_remote, "w1", how) == code
    assert two[0].do(fork_from_here, "w1", fork_later_and, "await") == 1
    for a, b in ((0, 1), (1, 0)):
        assert two[a].do(call_many, f"w{b}", 10) == 10
    shut_all_down(two)

"""Ends of processes: signals, exits in handlers, and many starts in one process."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_helpers import begin_counting, check_clean, counts, end_counting, shut_down
from process_helpers import TIMEOUT, Actor, actors, call, call_many, failure, join, state

from telegrad import rpc
from telegrad.testing import ResourceSnapshot, eventually
from telegrad.worker.default_worker import current_worker

pytestmark = pytest.mark.slow

ROUNDS = 30
MIB = 1 << 20

PROGRAM = """
import signal, sys, threading
from telegrad import rpc
sys.path += sys.argv[2:]
from process_helpers import hang
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=rpc.Options(init_method=sys.argv[1]))
DOES
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, rpc_timeout=TIMEOUT) as group:
        yield group


# ---- steps


def run_a_program() -> int:
    return subprocess.run([sys.executable, "-S", "-E", "-c", "raise SystemExit(7)"], check=False).returncode


def exit_python() -> None:
    sys.exit(3)


def exit_at_once() -> None:
    os._exit(3)


def close_worker() -> None:
    rpc.shutdown(graceful=False)


def requests_that_run() -> int:
    worker = current_worker()
    assert worker is not None
    return int(worker.engine.stats()["running_handlers"])


def start_and_stop(rank: int, where: str, static: bool) -> bool:
    """Join a group of two, call the other worker, and shut down."""
    join(f"w{rank}", rank, 2 if static else None, where, {})
    if static or rank == 1:
        assert call_many(f"w{1 - rank}", 2) == 2
    rpc.shutdown(timeout=TIMEOUT)
    return True


def measure() -> None:
    gc.collect()
    state["before"] = ResourceSnapshot.now()
    state["memory"] = psutil.Process().memory_info().rss


def growth() -> int:
    """Check that nothing has been added; return the growth of memory in bytes."""
    gc.collect()
    state["before"].assert_not_grown()
    return int(psutil.Process().memory_info().rss - state["memory"])


# ---- handlers


@pytest.mark.parametrize(
    ("function", "kind", "lives"),
    [
        (run_a_program, "", True),
        (exit_python, "RemoteError", True),
        (exit_at_once, "WorkerLost", False),
        (close_worker, "WorkerLost", False),
    ],
    ids=["subprocess", "sys.exit", "os._exit", "shutdown"],
)
def test_a_handler_that_ends_something(three: list[Actor], function: Any, kind: str, lives: bool) -> None:
    """Calls between the others are right all the while."""
    caller, callee, other = three
    caller.do(begin_counting, "w2")
    assert caller.do(call_many, "w1", 2) == 2
    raised, text = caller.do(failure, call, "w1", function)
    assert raised == kind, text
    if function is run_a_program:
        assert text == "7"
    results = caller.do(end_counting)
    assert results == {number: number * number for number in results}
    assert sorted(other.do(counts)) == sorted(results)
    if lives:
        assert caller.do(call_many, "w1", 10) == callee.do(call_many, "w0", 10) == 10
        check_clean(callee)
    left = three if lives else [caller, other]
    check_clean(caller, other)
    shut_down(*left)


# ---- signals

DOES = {
    "calls": 'rpc.rpc_sync("w1", hang, timeout=0)',
    "fetches": 'rpc.remote("w1", hang, timeout=0).to_here(timeout=0)',
    "waits": 'held = rpc.rpc_async("w1", hang, timeout=0); threading.Event().wait()',
}


@pytest.mark.parametrize("does", DOES.values(), ids=DOES.keys())
def test_a_handler_of_sigterm_that_exits(does: str, tmp_path: Path) -> None:
    """The worker says goodbye, and the process ends with the code and silently."""
    with actors(2, tmp_path, method="none") as (_, peer):
        where = f"file://{tmp_path}/store"
        joining = peer.begin(join, "w1", 1, 2, where, {})
        tests = Path(__file__).parents[1]
        command = [sys.executable, "-c", PROGRAM.replace("DOES", does), where, str(tests), str(tests / "failures")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
            try:
                joining.result()
                eventually(lambda: peer.do(requests_that_run) == 1, timeout=TIMEOUT)
                program.send_signal(signal.SIGTERM)
                _, text = program.communicate(timeout=TIMEOUT)
            finally:
                program.kill()
        assert (program.returncode, text) == (4, "")
        kind, why = peer.do(failure, call, "w0", abs, -1)
        assert (kind, "it shut down" in why) == ("WorkerLost", True), why


# ---- starts


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_many_starts_in_one_process_leave_nothing(static: bool, tmp_path: Path) -> None:
    with actors(2, tmp_path, method="none") as group:

        def turn(number: int) -> None:
            where = f"file://{tmp_path}/store{number}"
            if static:
                steps = [actor.begin(start_and_stop, actor.rank, where, True) for actor in group]
                assert [step.result() for step in steps] == [True, True]
            else:
                assert [actor.do(start_and_stop, 0, where, False) for actor in group] == [True, True]

        for number in range(5):
            turn(number)
        for actor in group:
            actor.do(measure)
        for number in range(5, 5 + ROUNDS):
            turn(number)
        for actor in group:
            assert actor.do(growth) < 8 * MIB
            assert actor.leave() == 0
            assert actor.stderr() == ""

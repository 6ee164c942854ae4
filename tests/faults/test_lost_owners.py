"""Callees of retried calls and owners of services that are killed or stopped.

A new process then takes the name of the callee, or registers the service. Nothing is left.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_helpers import LIMITS, LOST, check_clean, name_of_lost, on_both_signals, shut_down, strike
from process_helpers import TIMEOUT, Actor, actors, call_many, failure, state

from telegrad import rpc
from telegrad.rpc import Options
from telegrad.testing import eventually

LEASE = 2.0  # s
OFTEN = rpc.Retry(attempts=10_000, backoff=0.01, max_backoff=0.05)
TWICE = rpc.Retry(attempts=2, backoff=0.01, max_backoff=0.01)
SOON = 1.0  # s; of waits that are meant to end


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    """Processes, of which the first two are members of a dynamic group."""
    with actors(3, tmp_path, method="none") as group:
        for actor in group[:2]:
            actor.do(join, actor.name, str(tmp_path))
        yield group


def join(name: str, folder: str) -> None:
    options = Options(init_method=f"file://{folder}/store", rpc_timeout=TIMEOUT, member_lease=LEASE, **LIMITS)
    rpc.init_rpc(name, rpc_backend_options=options)


# ---- retried calls


def answer() -> None:
    """Let calls of `process` return."""
    state["answers"] = True


def process() -> int:
    """Return the id of this process if it answers; otherwise wait."""
    if "answers" not in state:
        state["begun"] = True
        threading.Event().wait()
    return os.getpid()


def has_begun() -> bool:
    return bool(state.get("begun"))


def retried(retry: rpc.Retry) -> int:
    return int(rpc.rpc_sync("w1", process, timeout=0, retry=retry))


@on_both_signals
def test_a_retried_call_runs_on_the_successor_of_a_lost_callee(
    with_signal: signal.Signals, three: list[Actor], tmp_path: Path
) -> None:
    """The successor takes the name of a stopped callee after its lease has expired."""
    caller, callee, successor = three
    waiting = caller.begin(retried, OFTEN)
    eventually(lambda: callee.do(has_begun))
    assert not waiting.is_over
    strike(callee, with_signal)
    successor.name = "w1"
    successor.do(answer)
    successor.do(join, "w1", str(tmp_path))
    assert waiting.result() == successor.process.pid
    assert successor.do(call_many, "w0", 10) == caller.do(call_many, "w1", 10) == 10
    check_clean(caller, successor)
    shut_down(caller, successor)


@on_both_signals
def test_a_retried_call_without_a_successor_ends(with_signal: signal.Signals, three: list[Actor]) -> None:
    caller, callee, _ = three
    waiting = caller.begin(name_of_lost, retried, TWICE)
    eventually(lambda: callee.do(has_begun))
    assert not waiting.is_over
    struck = strike(callee, with_signal)
    assert waiting.result() == "w1"
    assert time.monotonic() - struck < 2 * LOST  # each attempt ends with a loss of its own
    check_clean(caller)
    shut_down(caller)


# ---- services


def register(value: str) -> None:
    rpc.register_service("scores", {"of": value})


def may_register(value: str) -> bool:
    """Register the service; return False if its owner is still in the group."""
    kind, text = failure(register, value)
    assert not kind or "which is alive" in text, text
    return not kind


def find() -> str:
    state["service"] = rpc.get_service("scores", timeout=SOON)
    return str(state["service"].rpc_sync(timeout=0).get("of"))


def use() -> str:
    return str(state["service"].rpc_sync(timeout=0).get("of"))


def use_until_it_is_lost() -> None:
    while True:
        use()
        state["used"] = True


def is_in_use() -> bool:
    return bool(state.get("used"))


def drop() -> None:
    state.clear()


@on_both_signals
def test_the_owner_of_a_service_is_lost(with_signal: signal.Signals, three: list[Actor], tmp_path: Path) -> None:
    """Others register the service once the group has lost a stopped owner."""
    user, owner, successor = three
    successor.do(join, successor.name, str(tmp_path))
    owner.do(register, "w1")
    for actor in (user, successor):
        assert actor.do(find) == "w1"
        assert not actor.do(may_register, actor.name)
    using = user.begin(name_of_lost, use_until_it_is_lost)
    eventually(lambda: user.do(is_in_use))
    struck = strike(owner, with_signal)
    assert using.result() == "w1"
    assert time.monotonic() - struck < LOST
    for actor in (user, successor):
        assert actor.do(name_of_lost, use) == "w1"
        assert actor.do(name_of_lost, find) == "w1"
    eventually(lambda: successor.do(may_register, "w2"), timeout=TIMEOUT)
    assert user.do(find) == successor.do(find) == "w2"
    for actor in (user, successor):
        actor.do(drop)
    check_clean(user)  # the successor owns the value of the service
    shut_down(user, successor)

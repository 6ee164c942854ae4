"""Steps and checks that the tests of faults share."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from process_helpers import Actor, state

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.rpc.gathering_handlers import gathering_of
from telegrad.streams.service import Streams
from telegrad.testing import eventually
from telegrad.worker.default_worker import current_worker

HEARTBEAT = 0.6  # s
LOST = 5.0  # s until a wait has ended with the loss: three heartbeats, on a busy machine
LIMITS = {
    "heartbeat": HEARTBEAT,
    "local_heartbeat": HEARTBEAT,
    "connect_timeout": HEARTBEAT,
    "handshake_timeout": HEARTBEAT,
}
"""Options of workers that notice a stopped one within `LOST`."""

on_both_signals = pytest.mark.parametrize(
    "with_signal", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=lambda s: s.name
)


def strike(victim: Actor, with_signal: signal.Signals) -> float:
    """Kill or stop the victim; return the time."""
    if with_signal == signal.SIGSTOP:
        return victim.stop()
    assert victim.process.pid is not None
    os.kill(victim.process.pid, with_signal)
    return time.monotonic()


# ---- steps


def count(number: int) -> int:
    """Record a call at the callee."""
    with _counting:
        state.setdefault("counts", []).append(number)
    return number * number


_counting = threading.Lock()


def counts() -> list[int]:
    """Return the numbers of the calls that this worker has run."""
    return list(state.get("counts", ()))


def begin_counting(to: str) -> None:
    """Call `count` repeatedly in a thread of this worker, until `end_counting`."""
    state["calls"] = {}
    state["stop"] = threading.Event()

    def run() -> None:
        number = 0
        while not state["stop"].is_set():
            try:
                state["calls"][number] = rpc.rpc_sync(to, count, (number,), timeout=0)
            except WorkerLost:
                state["calls"][number] = None
            except BaseException as e:
                state["calls"][number] = repr(e)
            number += 1

    state["thread"] = threading.Thread(target=run)
    state["thread"].start()


def calls_so_far() -> int:
    return len(state["calls"])


def end_counting() -> dict[int, object]:
    """Return the results of the calls by number; None for a lost worker."""
    state["stop"].set()
    state["thread"].join(30)
    assert not state["thread"].is_alive(), "a call does not end"
    return dict(state["calls"])


def leftovers() -> dict[str, object]:
    """Return what this worker still holds for others or of them."""
    gc.collect()
    worker = current_worker()
    assert worker is not None
    table = worker.references.stats()
    found = {name: getattr(table, name) for name in ("owners", "forks", "pins", "users")}
    found |= dict(worker.autograd.left())
    found["calls"] = worker.engine.stats()["pending_calls"]
    found |= Streams.of(worker).left()
    found["operations"], found["offers"] = len(gathering_of(worker).operations), len(gathering_of(worker).open_offers)
    found["retries"] = len(worker.retries.describe())
    return {name: value for name, value in found.items() if value}


def leave() -> None:
    """Shut down gracefully, without a limit."""
    rpc.shutdown()


def loss(function: Callable[..., Any], *args: Any) -> str:
    """Return the kind of loss that a function raises.

    Raises:
        AssertionError: It raised no loss.
    """
    return type(_loss(function, *args)).__name__


def name_of_lost(function: Callable[..., Any], *args: Any) -> str:
    """Return the name of the worker in the loss that a function raises.

    Raises:
        AssertionError: It raised no loss, or the text does not name the worker.
    """
    error = _loss(function, *args)
    assert error.name in str(error)
    return error.name


def _loss(function: Callable[..., Any], *args: Any) -> WorkerLost:
    try:
        value = function(*args)
    except WorkerLost as e:  # or OwnerLost
        return e
    raise AssertionError(f"no loss, but the value {value!r}")


# ---- checks


def check_exactly_once(results: dict[int, object], ran: list[int], *, short: bool) -> int:
    """Check calls of `count` around a break; return how many were lost.

    Each call either ran exactly once with its own result, or raised WorkerLost and ran at most once.

    Args:
        short: The connection was broken for less than two heartbeats.
    """
    lost = [number for number, value in results.items() if value is None]
    assert {number: value for number, value in results.items() if value is not None} == {
        number: number * number for number in results if number not in lost
    }
    assert len(ran) == len(set(ran)), "a call ran twice"
    assert set(results) - set(lost) <= set(ran) <= set(results)
    if short:
        assert not lost
    return len(lost)


def check_clean(*group: Actor) -> None:
    """Check that the workers hold nothing."""
    for actor in group:
        eventually(lambda actor=actor: not actor.do(leftovers), timeout=20, what=f"{actor.name} to hold nothing")  # type: ignore[misc]


def shut_down(*group: Actor) -> None:
    """Shut the workers down together; their processes then end without an error."""
    for step in [actor.begin(leave) for actor in group]:
        step.result()
    for actor in group:
        assert actor.leave() == 0

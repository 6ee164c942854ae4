"""Members that are killed or stopped in a group operation.

The others get the loss with its name within the limit of the detector, and nothing is left.
"""

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fault_helpers import LIMITS, LOST, check_clean, name_of_lost, on_both_signals, shut_down, strike
from process_helpers import Actor, actors

from telegrad import rpc
from telegrad.rpc.gathering_handlers import gathering_of
from telegrad.testing import eventually
from telegrad.worker.default_worker import current_worker

OPERATIONS: dict[str, Callable[..., object]] = {
    "barrier": rpc.barrier,
    "all_gather": partial(rpc.all_gather, "value"),
    "broadcast of w0": partial(rpc.broadcast, "value", "w0"),
    "broadcast of w1": partial(rpc.broadcast, "value", "w1"),
}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, rpc_timeout=0, **LIMITS) as group:
        yield group


def take_part(operation: str, names: tuple[str, ...]) -> object:
    return OPERATIONS[operation](workers=names, timeout=0)


def takes_part() -> bool:
    """Return whether this worker is in an operation."""
    worker = current_worker()
    assert worker is not None
    return bool(gathering_of(worker).operations)


def has_offers() -> bool:
    """Return whether other workers take part in an operation that this worker leads."""
    worker = current_worker()
    assert worker is not None
    return bool(gathering_of(worker).open_offers)


def gather(names: tuple[str, ...]) -> dict[str, object]:
    return rpc.all_gather(1, names, timeout=0)


@on_both_signals
@pytest.mark.parametrize("victim", ["w0", "w1"])  # w0 is the leader of a barrier
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_member_is_lost_in_a_group_operation(
    operation: str, victim: str, with_signal: signal.Signals, three: list[Actor]
) -> None:
    """Lose a member while one other waits; the last one calls the operation later."""
    names = tuple(actor.name for actor in three)
    dying, early, late = sorted(three, key=lambda actor: (actor.name != victim, actor.name))
    dying.begin(take_part, operation, names)
    waiting = early.begin(name_of_lost, take_part, operation, names)
    eventually(lambda: dying.do(takes_part) and early.do(takes_part))
    eventually(lambda: dying.do(has_offers) or early.do(has_offers))
    assert not waiting.is_over
    struck = strike(dying, with_signal)
    after = late.begin(name_of_lost, take_part, operation, names)
    for step in (waiting, after):
        assert step.result() == victim
    assert time.monotonic() - struck < LOST

    rest = (early.name, late.name)
    for step in [actor.begin(gather, rest) for actor in (early, late)]:
        assert step.result() == dict.fromkeys(rest, 1)
    check_clean(early, late)
    shut_down(early, late)


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_a_member_is_stopped_before_it_is_connected(victim: str, three: list[Actor]) -> None:
    """Stop a member with which no other has a session yet."""
    names = tuple(actor.name for actor in three)
    stopped, *others = sorted(three, key=lambda actor: (actor.name != victim, actor.name))
    struck = strike(stopped, signal.SIGSTOP)
    steps = [actor.begin(name_of_lost, take_part, "barrier", names) for actor in others]
    for step in steps:
        assert step.result() == victim
    assert time.monotonic() - struck < LOST
    check_clean(*others)

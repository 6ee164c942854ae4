"""Workers that are killed or stopped at each step of each protocol.

Every wait on the other workers ends with the loss of that worker, they go on with each other, and nothing is left.
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fault_helpers import LIMITS, LOST, check_clean, leftovers, loss, on_both_signals, shut_down, strike
from process_helpers import TIMEOUT, Actor, actors, call_many, state

from telegrad import autograd, optim, rpc
from telegrad.rpc import RRef
from telegrad.testing import faults
from telegrad.testing.faults import Plan, Rule
from telegrad.worker.default_worker import current_worker

VICTIM, OBSERVER, BYSTANDER = "w1", "w0", "w2"


def hold(kind: str, destination: str, nth: int = 1) -> None:
    """Hold a message of this worker, and all behind it."""
    faults.add(Rule("delay", VICTIM, destination, kind, nth))


def wait_while_it_closes() -> bool:
    """Wait until a fault has been applied; return False after a while."""
    worker = current_worker()
    assert worker is not None
    return worker.faults.native.wait(1, int(TIMEOUT / 2 * 1e9))  # type: ignore[union-attr]


# ---- work that needs the victim


def call_it() -> Any:
    return rpc.rpc_sync(VICTIM, abs, (-1,), timeout=0)


def create() -> Any:
    return rpc.remote(VICTIM, dict, timeout=0).to_here(timeout=0)


def make_reference() -> None:
    state["held"] = rpc.remote(VICTIM, dict)
    state["held"].to_here()


def share_reference() -> Any:
    return rpc.rpc_sync(BYSTANDER, fetch, (state.pop("held"),), timeout=0)


def fetch(reference: RRef[Any]) -> Any:
    return reference.to_here(timeout=0)


def lend_reference() -> None:
    rpc.rpc_sync(VICTIM, keep, (RRef([1]),))


def keep(value: object) -> None:
    state["kept"] = value


def forget() -> None:
    state.clear()


def have_it_released() -> Any:
    """Wait behind the message that releases the reference."""
    rpc.rpc_sync(VICTIM, forget, timeout=0)
    while True:
        call_it()


def run_backward() -> Any:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(VICTIM, torch.mul, (x, 2), timeout=0).sum()])
        return autograd.get_gradients(context_id)[x]


def run_backward_through_it() -> Any:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(VICTIM, forward_to_bystander, (x,), timeout=0).sum()])
        return autograd.get_gradients(context_id)[x]


def forward_to_bystander(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(BYSTANDER, torch.mul, (x * 3, 2), timeout=0)  # type: ignore[no-any-return]


def train_here() -> Any:
    return rpc.rpc_sync(VICTIM, train, timeout=0)


def train() -> None:
    """Open a context in which the observer takes part, and end it."""
    with autograd.context():
        rpc.rpc_sync(OBSERVER, torch.mul, (torch.ones(2, requires_grad=True), 2))


def make_optimizer() -> None:
    parameters = rpc.remote(VICTIM, torch.nn.Parameter, (torch.ones(2),))
    parameters.to_here()
    state["optimizer"] = optim.DistributedOptimizer(torch.optim.SGD, [parameters], lr=0.1)


def step() -> Any:
    with autograd.context() as context_id:
        state.pop("optimizer").step(context_id)


class Row(NamedTuple):
    """A message of the victim, its receiver, work that needs it, and what precedes."""

    kind: str
    destination: str
    work: Callable[[], Any]
    prepare: Callable[[], Any] = call_it


ROWS = {
    "handshake": Row("handshake", "*", call_it, leftovers),
    "result": Row("value", OBSERVER, call_it),
    "creation": Row("created", OBSERVER, create),
    "confirmation of a reference": Row("reference", BYSTANDER, share_reference, make_reference),
    "release of a reference": Row("reference", OBSERVER, have_it_released, lend_reference),
    "forward pass": Row("value", OBSERVER, run_backward),
    "backward pass": Row("backward", OBSERVER, run_backward),
    "backward pass through it": Row("backward", BYSTANDER, run_backward_through_it),
    "end of a context": Row("context", OBSERVER, train_here),
    "optimizer step": Row("value", OBSERVER, step, make_optimizer),
}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, faults=str(Plan()), rpc_timeout=0, **LIMITS) as group:
        yield group


@on_both_signals
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_every_wait_ends_at_each_step(row: Row, with_signal: signal.Signals, three: list[Actor]) -> None:
    observer, victim, bystander = three
    observer.do(row.prepare)
    victim.do(hold, row.kind, row.destination)
    waiting = observer.begin(loss, row.work)
    victim.do(faults.wait, 1)
    assert not waiting.is_over
    struck = strike(victim, with_signal)
    assert waiting.result() in ("WorkerLost", "OwnerLost")
    assert time.monotonic() - struck < LOST
    assert observer.do(call_many, BYSTANDER, 10) == bystander.do(call_many, OBSERVER, 10) == 10
    observer.do(forget)
    check_clean(observer, bystander)
    shut_down(observer, bystander)


@on_both_signals
@pytest.mark.parametrize(("kind", "nth"), [("shutdown", 1), ("shutdown", 2), ("goodbye", 1)])
def test_a_graceful_shutdown_ends_at_each_step(
    kind: str, nth: int, with_signal: signal.Signals, three: list[Actor]
) -> None:
    """The others wait for the victim without a limit."""
    observer, victim, bystander = three
    for actor in (observer, bystander):
        actor.do(call_many, VICTIM, 2)
    victim.do(hold, kind, "*", nth)
    leaving = [actor.begin(rpc.shutdown) for actor in three]
    assert victim.do(wait_while_it_closes)
    struck = strike(victim, with_signal)
    for waiting in (leaving[0], leaving[2]):
        waiting.result()
    assert time.monotonic() - struck < LOST
    assert observer.leave() == bystander.leave() == 0

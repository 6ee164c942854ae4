"""Work and its remains when a connection breaks at a chosen message."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import check_clean, leave, shut_down
from process_helpers import TIMEOUT, Actor, actors, call_many, failure, state

from telegrad import autograd, rpc
from telegrad.errors import OwnerLost, WorkerLost
from telegrad.rpc import Options
from telegrad.testing import Local, cluster, eventually, faults
from telegrad.testing.faults import Plan, Rule
from telegrad.worker.default_worker import current_worker

SOON = 3.0  # s


def times_on_itself(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(rpc.get_worker_info(), torch.mul, (x * 2, 3))  # type: ignore[no-any-return]


def test_a_context_whose_root_is_lost_leaves_nothing() -> None:
    """The connection breaks at the first gradients; the program leaves the context."""
    with cluster(2, Options(faults=str(Plan()), resume=False)) as group:
        for _ in range(30):
            cut = Rule("cut", "w0", "w1", "backward")
            faults.add(cut)
            with autograd.context() as context_id:
                x = torch.ones(2, requires_grad=True)
                loss = rpc.rpc_sync("w1", times_on_itself, (x,)).sum()
                with pytest.raises(WorkerLost):
                    autograd.backward(context_id, [loss])
            faults.remove(cut)
            assert rpc.rpc_sync("w1", abs, (-1,)) == 1
            eventually(lambda: not any(group[1]._worker.autograd.left().values()), timeout=SOON)


@pytest.mark.parametrize("arguments", [((1, 2),), ({1, 2},)], ids=["by the codec", "by pickle"])
def test_a_creation_right_after_a_loss_is_kept_or_lost_at_both_ends(arguments: Any) -> None:
    """The call fails before the loss is processed; the session may have ended."""
    with cluster(2, Options(faults=str(Plan()), resume=False)) as group:
        for _ in range(30):
            cut = Rule("cut", "w1", "w0", "value")
            faults.add(cut)
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("w1", abs, (-1,), timeout=0)
            with suppress(OwnerLost):
                assert rpc.remote("w1", max, arguments).to_here() == 2
            eventually(lambda: group[1]._worker.references.leaks() == [], timeout=SOON)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(2, tmp_path, faults=str(Plan()), transports=("tcp",), rpc_timeout=0) as group:
        yield group


def call_once(to: str) -> Any:
    return rpc.rpc_sync(to, abs, (-1,), timeout=0)


def test_a_server_that_shuts_down_waits_for_a_trainer_whose_connection_broke(two: list[Actor]) -> None:
    trainer, server = two
    assert trainer.do(call_many, "w1", 2) == 2
    leaving = server.begin(leave)
    trainer.do(faults.add, Rule("cut", "w0", "w1", "call"))
    trainer.do(failure, call_once, "w1")
    with pytest.raises(AssertionError, match="takes too long"):
        leaving.result(timeout=SOON)
    assert trainer.do(call_many, "w1", 2) == 2
    trainer.do(leave)
    leaving.result()


def count(runs: Local[list[int]], number: int) -> int:
    runs.value.append(number)
    return number


@pytest.mark.parametrize("kind", ["call", "value"])
def test_a_cut_at_each_message_of_a_call(kind: str) -> None:
    """Each call runs at most once, and the next one works."""
    source, destination = ("w0", "w1") if kind == "call" else ("w1", "w0")
    runs: Local[list[int]] = Local([])
    with cluster(2, Options(faults=str(Plan()), resume=False)):
        for number in range(0, 20, 2):
            faults.add(Rule("cut", source, destination, kind, nth=2))
            assert rpc.rpc_sync("w1", count, (runs, number)) == number
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("w1", count, (runs, number + 1), timeout=0)
    times = Counter(runs.value)  # the group is gone, so nothing runs any more
    assert [times[number] for number in range(0, 20, 2)] == [1] * 10
    assert {times[number] for number in range(1, 20, 2)} <= {0, 1}


# ---- contexts of a trainer that dies


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(3, tmp_path, rpc_timeout=0) as group:
        yield group


def train() -> None:
    with autograd.context():
        rpc.rpc_sync("w1", forward_later, (torch.ones(2, requires_grad=True),), timeout=0)


may_forward = threading.Event()


def forward_later(x: torch.Tensor) -> torch.Tensor:
    """Send another request in the context once the trainer is dead."""
    state["entered"] = True
    assert may_forward.wait(TIMEOUT)
    state["forwarded"] = failure(rpc.rpc_sync, "w2", torch.mul, (x, 2))
    return x * 2


def has_entered() -> bool:
    return "entered" in state


def let_forward() -> None:
    may_forward.set()


def has_forwarded() -> bool:
    return "forwarded" in state


def lost() -> list[str]:
    worker = current_worker()
    assert worker is not None
    return list(worker.members.lost_names())


@pytest.mark.parametrize("knows", [False, True], ids=["not connected", "connected"])
def test_requests_in_the_context_of_a_dead_trainer_leave_nothing(three: list[Actor], knows: bool) -> None:
    """A worker gets its first request of the context after the death of the trainer."""
    trainer, first, second = three
    if knows:
        assert trainer.do(call_many, "w2", 2) == 2
    trainer.begin(train)
    eventually(lambda: first.do(has_entered))
    trainer.end()
    for actor in (first, second):
        eventually(lambda actor=actor: actor.do(lost) == ["w0"])  # type: ignore[misc]
    first.do(let_forward)
    eventually(lambda: first.do(has_forwarded))
    check_clean(first, second)
    shut_down(first, second)

"""Backward passes next to a loss: the root gets the loss, whatever arrives later."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import check_clean, shut_down
from process_helpers import Actor, actors, call_many, failure

from telegrad import autograd, rpc
from telegrad.errors import WorkerLost
from telegrad.rpc import Options
from telegrad.testing import Cluster, Gate, cluster, eventually, faults
from telegrad.testing.faults import Plan, Rule
from telegrad.worker import Worker
from telegrad.worker.default_worker import current_worker

LIMIT = 20.0  # s


def through_w1(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w1", torch.mul, (x * 2, 3), timeout=0)  # type: ignore[no-any-return]


def run_pass() -> list[float]:
    """Run a pass in which w2 gets gradients twice: at once, and after those of w3.

    Only w2 calls w1.
    """
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        first = rpc.rpc_sync("w2", through_w1, (x,), timeout=0)
        second = rpc.rpc_sync("w3", torch.mul, (rpc.rpc_sync("w2", torch.mul, (x, 5), timeout=0), 7), timeout=0)
        autograd.backward(context_id, [first.sum(), second.sum()])
        return autograd.get_gradients(context_id)[x].tolist()


# ---- a connection breaks, and only its ends know


def begin_pass(group: Cluster, results: list[object]) -> threading.Thread:
    """Run the pass in a thread, and keep its result or its loss."""

    def run() -> None:
        with group[0]:
            try:
                results.append(run_pass())
            except BaseException as e:
                results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def release(worker: rpc.Worker) -> None:
    """Release what one worker holds back."""
    rules = worker._worker.faults
    assert rules is not None
    rules.native.release()


def has_handled_the_loss(worker: rpc.Worker) -> bool:
    """Return whether the next session with w1 is open, which waits for that."""
    try:
        return bool(worker.rpc_sync("w1", abs, (-1,), timeout=LIMIT) == 1)
    except WorkerLost:
        return False


@pytest.mark.parametrize("order", [(3, 2), (2, 3)], ids=["gradients first", "loss first"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_gradients_for_the_part_of_a_worker_with_a_loss(transport: str, order: tuple[int, ...]) -> None:
    """The report of the loss is held, while its worker gets further gradients."""
    with cluster(4, Options(transports=(transport,), faults=str(Plan()), resume=False, rpc_timeout=0)) as group:
        assert run_pass() == [41.0, 41.0]
        for source, destination, action in (("w3", "w0", "delay"), ("w2", "w0", "delay"), ("w1", "w2", "cut")):
            faults.add(Rule(action, source, destination, "backward"))
        results: list[object] = []
        passing = begin_pass(group, results)
        faults.wait(3)
        eventually(lambda: has_handled_the_loss(group[2]))
        received = group[2]._worker.engine.stats()["requests"]
        assert passing.is_alive()
        for worker in order:
            release(group[worker])
            if order[0] == 3 == worker:
                eventually(lambda: group[2]._worker.engine.stats()["requests"] > received)
        passing.join(LIMIT)
        assert not passing.is_alive(), "the pass does not end"
        (error,) = results
        assert isinstance(error, WorkerLost), error
        assert "w1 is lost" in str(error)
        assert run_pass() == [41.0, 41.0]
        for each in group:
            eventually(lambda each=each: not any(each._worker.autograd.left().values()))  # type: ignore[misc]


# ---- a process dies, and all are notified


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(4, tmp_path, faults=str(Plan()), rpc_timeout=0) as group:
        yield group


def me() -> Worker:
    worker = current_worker()
    assert worker is not None
    return worker


def hold(source: str, destination: str) -> None:
    faults.add(Rule("delay", source, destination, "backward"))


def lost() -> list[str]:
    return list(me().members.lost_names())


def run_and_fail() -> tuple[str, str]:
    return failure(run_pass)


@pytest.mark.parametrize("known", [False, True], ids=["not connected", "connected"])
def test_gradients_that_arrive_after_a_death(four: list[Actor], known: bool) -> None:
    """The root is connected to the process that dies, or only hears of its death."""
    root, dying, part, other = four
    assert part.do(call_many, "w1", 2) == 2
    if known:
        assert root.do(call_many, "w1", 2) == 2
    dying.do(hold, "w1", "w2")
    other.do(hold, "w3", "w0")
    passing: Any = root.begin(run_and_fail)
    for actor in (dying, other):
        actor.do(faults.wait, 1)
    dying.end()
    eventually(lambda: part.do(lost) == ["w1"])
    other.do(faults.release)
    kind, text = passing.result()
    assert (kind, "w1 is lost" in text) == ("WorkerLost", True), text
    check_clean(root, part, other)
    shut_down(root, part, other)


# ---- a worker cannot report to the root


def through_w2(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("w2", torch.mul, (x * 2, 3), timeout=0)  # type: ignore[no-any-return]


def test_a_part_that_cannot_reach_the_root() -> None:
    """The worker that sent it gradients passes the error on."""
    options = Options(transports=("tcp",), faults=str(Plan()), resume=False, rpc_timeout=0)
    with cluster(3, options) as group:
        assert rpc.rpc_sync("w1", through_w2, (torch.ones(1),)).tolist() == [6.0]
        rule = Rule("corrupt", "w0", kind="handshake", count=None)
        faults.add(rule)
        with autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("w1", through_w2, (x,)).sum()
            with pytest.raises(WorkerLost, match="worker w2 is lost: it cannot reach worker w0: "):
                autograd.backward(context_id, [loss])
        faults.clear()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w1", through_w2, (x,)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 6.0]
        for each in group:
            eventually(lambda each=each: not any(each._worker.autograd.left().values()))  # type: ignore[misc]


# ---- a context ends where its root is lost, and the root lives


def times_three_when_open(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    gate.enter()
    return x * 3


def through_w2_when_open(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    return rpc.rpc_sync("w2", times_three_when_open, (x * 2, gate), timeout=LIMIT)  # type: ignore[no-any-return]


def test_a_result_without_its_context_is_an_error() -> None:
    """Only the session of w1 and w2 ends; the call of w0 to w2 goes on."""
    options = Options(transports=("tcp",), faults=str(Plan()), resume=False, rpc_timeout=LIMIT)
    with cluster(3, options) as group:
        gate = Gate()
        contexts = group[2]._worker.autograd.contexts
        with group[1]:
            assert rpc.rpc_sync("w2", abs, (-1,)) == 1
            with autograd.context():
                x = torch.ones(2, requires_grad=True)
                result = rpc.rpc_async("w0", through_w2_when_open, (x, gate))
                assert gate.entered.acquire(timeout=LIMIT)
                faults.add(Rule("cut", "w1", "w2"))
                with pytest.raises(WorkerLost):
                    rpc.rpc_sync("w2", abs, (-1,))
                eventually(lambda: not contexts.table)
                gate.open()
                with pytest.raises(WorkerLost, match=r"worker w1 is lost: so autograd context \d+ of worker w1 has"):
                    result.wait()

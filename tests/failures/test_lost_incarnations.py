"""Errors of losses name the process that was lost, not its successor."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.contexts import ID_BITS, Contexts
from telegrad.errors import OwnerLost, UnknownWorker, WorkerLost
from telegrad.group.records import Member
from telegrad.optim.ask import _Ended
from telegrad.protocols.membership import incarnation_of
from telegrad.testing import Cluster, Gate, cluster, eventually
from telegrad.types import WorkerInfo
from telegrad.worker.calls.retrying import start_retrying
from telegrad.worker.losses import Losses, LossReason
from telegrad.worker.membership.members import Members

OLD, NEW = incarnation_of(1, 7), incarnation_of(2, 5)


def lost_process(call: Any) -> tuple[str, int]:
    """Return the name and the incarnation in the error of a function."""
    with pytest.raises(WorkerLost) as caught:
        call()
    return caught.value.name, caught.value.incarnation


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("to", ["name", "id", "info"])
def test_a_call_to_a_worker_that_has_left(dynamic: bool, to: str) -> None:
    with cluster(2, dynamic=dynamic, graceful=False, check=False) as group:
        old = group[1]
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
        process = old._worker.incarnation
        old.shutdown(graceful=False)
        eventually(lambda: 1 in group[0]._worker.members.lost)
        callee = {"name": "w1", "id": 1, "info": old.info}[to]
        assert lost_process(lambda: rpc.rpc_sync(callee, abs, (-1,))) == ("w1", process)
        eventually(lambda: not dynamic or 1 not in group[0]._worker.members.ids())
        assert lost_process(lambda: rpc.rpc_sync(callee, abs, (-1,))) == ("w1", process)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.fixture
def pending() -> Any:
    gate = Gate()
    with cluster(2, dynamic=True, graceful=False, check=False) as group:
        yield group, gate, rpc.rpc_async("w1", gate.enter, timeout=0)
        gate.open()


def replace(group: Cluster, gate: Gate) -> int:
    """Replace w1, and return the incarnation of its first process."""
    process = group[1]._worker.incarnation

    def restart() -> None:
        group[1].shutdown(graceful=False)
        group.workers[1] = rpc.Worker("w1", store=group.store)

    restarting = threading.Thread(target=restart)
    restarting.start()
    eventually(lambda: 1 in group[0]._worker.members.lost)
    gate.open()
    restarting.join(20)
    assert rpc.rpc_sync("w1", abs, (-1,)) == 1
    assert group[0]._worker.members.connected[1] > process
    return process


def test_a_replaced_worker(pending: Any) -> None:
    group, gate, future = pending
    owned = rpc.remote("w1", dict)
    owned.to_here()
    gate.wait_for()
    old = replace(group, gate)
    assert lost_process(future.wait) == ("w1", old)
    assert lost_process(owned.to_here) == ("w1", old)
    with pytest.raises(OwnerLost):
        owned.to_here()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_pass_through_a_worker_that_is_gone(dynamic: bool) -> None:
    with cluster(2, dynamic=dynamic, graceful=False, check=False) as group, autograd.context() as context:
        loss = rpc.rpc_sync("w1", scaled, (torch.ones(1, requires_grad=True),)).sum()
        group[1].shutdown(graceful=False)
        eventually(lambda: 1 in group[0]._worker.members.lost)
        run = partial(autograd.backward, context, [loss])
        assert lost_process(run) == ("w1", group[1]._worker.incarnation)


def test_a_worker_that_is_replaced_while_it_has_a_session(pending: Any) -> None:
    """The end of the old session follows the entry of the new process."""
    group, gate, future = pending
    core, old = group[0]._worker, group[1]._worker.incarnation
    gate.wait_for()
    core.add_member(core.members.get(1)._replace(incarnation=old + (1 << 32)))
    assert lost_process(future.wait) == ("w1", old)
    eventually(lambda: 1 not in core.members.connected)


def test_a_service_of_a_worker_that_is_gone() -> None:
    with cluster(2, dynamic=True, graceful=False, check=False) as group:
        with group[1]:
            rpc.register_service("ps", 5)
        group[1].shutdown(graceful=False)
        assert lost_process(lambda: rpc.get_service("ps", timeout=1)) == ("w1", group[1]._worker.incarnation)


def test_an_attempt_after_the_group_has_forgotten_the_callee() -> None:
    def resolve(to: object) -> WorkerInfo:
        raise UnknownWorker(("w0", 0), to)

    with cluster(2, dynamic=True, graceful=False, check=False) as group:
        core, old = group[0]._worker, group[1]
        core.calls._resolve_worker = resolve
        core.lose_member(1, old._worker.incarnation, "it was killed")
        retry = rpc.Retry(attempts=1)
        future = start_retrying(core, old.info, abs, (-1,), None, -1, retry, pause=0.001)
        assert lost_process(future.wait) == ("w1", old._worker.incarnation)


def test_the_owner_of_parameters_that_has_left() -> None:
    with cluster(2, dynamic=True, graceful=False, check=False) as group:
        core, old = group[0]._worker, group[1]._worker.incarnation
        core.lose_member(1, old, "it was killed")
        ended = _Ended(core, 1, error=UnknownWorker(("w0", 0), 1))
        assert lost_process(ended.wait) == ("w1", old)


def test_a_context_that_a_loss_has_ended() -> None:
    contexts = Contexts(0, 0, lambda *_: None, lambda *_: None, lambda _: True, None, "w{}".format, lambda _: OLD)
    context_id = (1 << ID_BITS) + 1
    context = contexts.on_request(context_id, 2, 1)
    assert context is not None
    message = contexts.on_send(context, 3, [torch.ones(1, requires_grad=True)], True)
    assert message is not None
    contexts.peer_lost(1, 1)
    found = contexts.find_loss(context_id, 2)
    assert found is not None
    assert (found.name, found.incarnation) == ("w1", OLD)
    why = context.why_unknown(message)
    assert isinstance(why, WorkerLost)
    assert (why.name, why.incarnation) == ("w1", OLD)


def test_the_process_of_a_reason() -> None:
    losses, replaced = Losses(), "another process has become worker w1"
    assert losses.find(1, "closed", 0, OLD) == OLD
    assert losses.find(1, "closed", OLD, NEW) == OLD, "the end of its session has not been handled"
    losses.record(1, OLD, "closed")
    assert losses.find(1, "closed", 0, NEW) == OLD, "the successor has no session"
    assert losses.find(1, "no connection", 0, NEW) == NEW
    assert losses.find(1, "closed", NEW, NEW) == NEW
    losses.record(1, OLD, replaced)
    assert losses.find(1, replaced, NEW, NEW) == OLD
    assert losses.find(1, LossReason("closed", OLD), NEW, NEW) == OLD
    losses.forget(1)
    assert losses.incarnations(1) == []


def test_the_process_with_a_number() -> None:
    members = Members(WorkerInfo("me", 0), lambda: None)
    for incarnation in (OLD, NEW):
        members.add(Member(1, "w1", incarnation, [], "host"))
    assert [members.process_of(1, ordinal) for ordinal in (1, 2, 3)] == [OLD, NEW, 0]
    assert members.last_lost(1) == OLD

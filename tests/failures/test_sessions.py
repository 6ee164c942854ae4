"""Connections that break between two live workers.

Both ends lose the session, and the next one begins without what it counted.
"""

import contextvars
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import OwnerLost, RpcTimeout, WorkerLost
from telegrad.protocols.rref import Add, Ticket, TicketKind, UserState
from telegrad.rpc import Options
from telegrad.rref.creation import PendingCreation
from telegrad.testing import Cluster, Gate, cluster, eventually
from telegrad.wire import Loss
from telegrad.worker.calls.encoded import PLAIN_MESSAGE
from telegrad.worker.refs.messages import as_plain

TIMEOUT = 20.0


@pytest.fixture
def w() -> Iterator[Cluster]:
    with cluster(2, Options(transports=("tcp",), resume=False)) as group:
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        yield group
        for worker in (group[0], group[1]):
            eventually(lambda worker=worker: worker._worker.references.stats().forks == 0)  # type: ignore[misc]


def accepted_sockets(ports: set[int]) -> list[socket.socket]:
    """Return further descriptors of the connections accepted at these ports."""
    connections = psutil.Process().net_connections("tcp4")
    return [socket.socket(fileno=os.dup(c.fd)) for c in connections if c.raddr and c.laddr.port in ports]


def break_connections(w: Cluster) -> None:
    """Shut down the sockets between the two workers; wait until both know."""
    ports = {int(address.rpartition(":")[2]) for one in (w[0], w[1]) for address in one._worker.member.addresses}
    before = [one._worker.references.epoch_of(1 - one._worker.info.id) for one in (w[0], w[1])]
    (end,) = accepted_sockets(ports)
    with end:
        end.shutdown(socket.SHUT_RDWR)
    for one, epoch in zip((w[0], w[1]), before, strict=True):
        wait_until_handled(one, epoch)


def wait_until_handled(one: rpc.Worker, epoch: int) -> None:
    """Wait until a worker has handled the end of the session with the other one.

    Calls that it makes meanwhile may fail with the ended session.
    """
    eventually(lambda: one._worker.references.epoch_of(1 - one._worker.info.id) > epoch)
    stats = one._worker.engine.stats
    eventually(lambda: (now := stats())["running_handlers"] == now["running_requests"])


def test_both_ends_lose_what_the_session_counted(w: Cluster) -> None:
    held = w[0].remote("w1", dict)
    assert held.to_here() == {}
    assert len(w[1]._worker.references.leaks()) == 1
    break_connections(w)
    eventually(lambda: w[1]._worker.references.leaks() == [])
    with pytest.raises(OwnerLost):
        held.to_here()


def test_the_next_session_works_at_once(w: Cluster) -> None:
    """The first creation, and the first reference sent, connect again and are counted."""
    break_connections(w)
    made = w[0].remote("w1", list)
    assert made.to_here() == []
    break_connections(w)
    with w[0]:
        own = rpc.RRef(torch.ones(2))
    assert torch.equal(w[0].rpc_sync("w1", fetch, (own,)), torch.ones(2))
    assert w[0]._worker.members.lost == w[1]._worker.members.lost == {}


def fetch(rref: "rpc.RRef[torch.Tensor]") -> torch.Tensor:
    return rref.to_here()


entered, may_return = threading.Event(), threading.Event()


def own_slowly() -> "rpc.RRef[int]":
    entered.set()
    assert may_return.wait(TIMEOUT)
    return rpc.RRef(7)


def test_a_reply_of_an_ended_session_takes_its_references_back(w: Cluster) -> None:
    entered.clear()
    may_return.clear()
    result = w[0].rpc_async("w1", own_slowly)
    assert entered.wait(TIMEOUT)
    break_connections(w)
    with pytest.raises(WorkerLost) as lost:
        result.wait()
    assert lost.value._loss == Loss.CLOSED
    may_return.set()
    eventually(lambda: w[1]._worker.references.stats().owners == 0)


def test_contexts_of_an_ended_session_end(w: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with w[0], autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", torch.sum, args=(x,))
        break_connections(w)
        with pytest.raises(WorkerLost, match="an earlier connection"):
            autograd.backward(context_id, [loss])
    eventually(lambda: not w[1]._worker.autograd.contexts.table)
    with w[0], autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", torch.sum, args=(x,))])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(2))
    eventually(lambda: not w[1]._worker.autograd.contexts.table)


@pytest.mark.parametrize("plain", [False, True])
def test_a_call_made_while_the_end_of_a_session_is_handled(
    w: Cluster, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """Its session is the next one, so its gradients arrive."""
    x, made = torch.ones(2, requires_grad=True), list[Any]()
    part = w[0]._worker.autograd
    peer_lost = part.peer_lost

    def call_first(peer: int, why: str) -> None:
        if not made:
            made.append(body.run(rpc.rpc_async, "w1", torch.mul, (x, 2)))
        peer_lost(peer, why)

    monkeypatch.setattr(part, "peer_lost", call_first)
    with w[0], autograd.plain() if plain else autograd.context() as context_id:
        body = contextvars.copy_context()
        break_connections(w)
        eventually(lambda: made)
        loss = made[0].wait().sum()
        if plain:
            loss.backward()
        else:
            autograd.backward(context_id, [loss])
        assert torch.equal(x.grad if plain else autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))


def test_the_end_of_a_context_is_sent_to_a_returned_worker(w: Cluster) -> None:
    worker = w[0]._worker
    with w[0], autograd.context():
        rpc.rpc_sync("w1", torch.sum, args=(torch.ones(2, requires_grad=True),))
        for part in (worker.references, worker.autograd):
            part.peer_lost(1, "it is silent", *[True] * (part is worker.references))
        worker.on_peer_back(1)
    eventually(lambda: not w[1]._worker.autograd.contexts.table)


def test_references_to_a_returned_worker_are_counted(w: Cluster) -> None:
    worker = w[0]._worker
    worker.references.peer_lost(1, "it is silent", gone=True)
    worker.on_peer_back(1)
    made = w[0].remote("w1", list)
    assert made.to_here() == []
    assert w[0].rpc_sync("w1", fetch, (made,)) == []
    assert [sorted(leak.tokens) for leak in w[1]._worker.references.leaks()] == [[0]]


CLOSED = 1 << 40  # no connection has this number


def test_messages_of_an_ended_session_count_nothing(w: Cluster) -> None:
    held = w[0].remote("w1", dict)
    held.to_here()
    owner, user = w[1]._worker.references, w[0]._worker.references
    owner.on_message(0, CLOSED, as_plain(Add(held.id)))
    assert owner.stats().forks == 1
    unknown = held.id._replace(local_id=1 << 20)
    (late,) = user.receive([Ticket(unknown, 1, TicketKind.GRANT, 0)], [0], 1, CLOSED)
    with pytest.raises(OwnerLost):
        late.to_here()
    owner.accept_create(unknown, 0, CLOSED)
    owner.set_result(unknown, 1, None)
    assert owner.stats().owners == 1
    del held, late


def test_the_next_session_waits_until_the_end_of_the_last_is_handled(
    w: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its references would be lost with those of the ended one."""
    owner, news = w[1]._worker, Gate()
    on_peer_lost = owner.on_peer_lost

    def handle_late(*arguments: Any) -> None:
        news.enter()
        on_peer_lost(*arguments)

    held = w[0].remote("w1", dict)
    assert held.to_here() == {}
    monkeypatch.setattr(owner, "on_peer_lost", handle_late)
    (end,) = accepted_sockets({int(each._worker.member.addresses[0].rpartition(":")[2]) for each in w})
    with end:
        end.shutdown(socket.SHUT_RDWR)
    news.wait_for()
    wait_until_handled(w[0], 0)
    made = w[0].remote("w1", list)
    with pytest.raises(RpcTimeout):
        w[0].rpc_sync("w1", abs, (-1,), timeout=0.3)
    assert len(owner.references.leaks()) == 1, "that of the ended session"
    news.open()
    assert made.to_here() == []
    assert w[0].rpc_sync("w1", abs, (-1,)) == 1
    assert [sorted(leak.tokens) for leak in owner.references.leaks()] == [[0]], "that of the next session"
    assert made.to_here() == []
    with pytest.raises(OwnerLost):
        held.to_here()
    del made, held
    eventually(lambda: owner.references.leaks() == [])


def test_a_creation_ends_with_the_session_that_carried_it(w: Cluster) -> None:
    """The end may be processed before the creation is registered."""
    worker = w[0]._worker
    creation = PendingCreation(worker, (1, "f", 0))
    rref = worker.references.begin_create(1, worker.references.new_id(), creation)
    creation.finish(WorkerLost("w1", "the connection was lost"))
    creation.mark_used()
    assert worker.references.table.state_of(rref) is UserState.LOST
    worker.references.release_handle(rref, worker.references.table.generation)
    eventually(lambda: worker.references.table.state_of(rref) is None)


def test_a_graceful_shutdown_right_after_a_break() -> None:
    """Cover both orders: an end sees the break before its shutdown, or in it."""
    for _ in range(20):
        with cluster(2, Options(transports=("tcp",), resume=False, shutdown_timeout=TIMEOUT)) as group:
            assert group[0].rpc_sync("w1", abs, (-1,)) == 1
            ports = {int(one._worker.member.addresses[0].rpartition(":")[2]) for one in (group[0], group[1])}
            (end,) = accepted_sockets(ports)
            with end:
                end.shutdown(socket.SHUT_RDWR)


def test_a_worker_without_which_the_group_shuts_down_gathers_alone(w: Cluster) -> None:
    """Skip the others: they went on while the connection was lost."""
    gone = w[1]._worker.members.gone_at_shutdown
    gone.add(1)
    with w[1]:
        assert rpc.api._all_gather("own", timeout=TIMEOUT) == {"w1": "own"}
    gone.clear()


def send_to_one(own: "rpc.RRef[torch.Tensor]") -> None:
    rpc.rpc_sync("w1", fetch, (own,))


def send_to_several(own: "rpc.RRef[torch.Tensor]") -> None:
    rpc.wait_all(rpc.multicast(["w1"], fetch, (own,)))


@pytest.mark.parametrize("send", [send_to_one, send_to_several])
def test_a_ticket_made_after_the_end_of_its_session_counts_nothing(
    w: Cluster, monkeypatch: pytest.MonkeyPatch, send: Callable[["rpc.RRef[torch.Tensor]"], None]
) -> None:
    """The session ends between the epoch of a message and its ticket."""
    worker = w[0]._worker
    share = worker._share

    def break_and_share(*arguments: Any) -> Ticket:
        break_connections(w)
        return share(*arguments)

    with w[0]:
        own = rpc.RRef(torch.ones(2))
        with monkeypatch.context() as patch:
            patch.setattr(worker.messages, "_share", break_and_share)
            with pytest.raises(WorkerLost):
                send(own)
        assert worker.references.leaks() == []
        assert torch.equal(rpc.rpc_sync("w1", fetch, (own,)), torch.ones(2))


def test_a_message_made_while_its_receiver_was_lost_is_not_sent_after_its_return(
    w: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticket counts nothing."""
    worker = w[0]._worker
    share = worker._share

    def share_and_return(*arguments: Any) -> Ticket:
        ticket = share(*arguments)
        worker.references.peer_joined(1)
        return ticket

    with w[0]:
        own = rpc.RRef(torch.ones(2))
        worker.references.peer_lost(1, "it is silent", gone=True)
        with monkeypatch.context() as patch:
            patch.setattr(worker.messages, "_share", share_and_return)
            with pytest.raises(WorkerLost):
                rpc.rpc_sync("w1", fetch, (own,))
        assert torch.equal(rpc.rpc_sync("w1", fetch, (own,)), torch.ones(2))


def test_a_request_about_a_reference_belongs_to_the_session_of_its_ticket(
    w: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends between its ticket and the encoding of the request."""
    worker = w[0]._worker
    encode = worker.messages.encode

    def break_and_encode(*arguments: Any) -> Any:
        _, _, spec = (*arguments, PLAIN_MESSAGE)[:3]
        if spec.target is not None:  # of a creation
            break_connections(w)
        return encode(*arguments)

    with w[0]:
        held = rpc.remote("w1", dict)
        held.to_here()
        monkeypatch.setattr(worker.messages, "encode", break_and_encode)
        kept = held.remote().copy()
        with pytest.raises(OwnerLost):
            kept.to_here()
    assert worker.references.stats().pins == 0
    eventually(lambda: w[1]._worker.references.stats().owners == 0)


class Stubborn:
    """Value whose destructor waits."""

    begun = threading.Event()
    gate = threading.Event()

    def __del__(self) -> None:
        Stubborn.begun.set()
        Stubborn.gate.wait(TIMEOUT)


held: list[rpc.RRef[Stubborn]] = []


def test_a_destructor_does_not_delay_the_events_of_other_workers() -> None:
    Stubborn.begun.clear()
    Stubborn.gate.clear()
    try:
        with cluster(3, Options(transports=("tcp",)), graceful=False, check=False) as group:
            group[0].rpc_sync("w1", held.append, (rpc.RRef(Stubborn()),))
            assert group[0].rpc_sync("w2", abs, (-1,)) == 1
            group[1].shutdown(graceful=False)
            held.clear()
            assert Stubborn.begun.wait(TIMEOUT)
            group[2].shutdown(graceful=False)
            eventually(lambda: "w2" in group[0]._worker.members.lost_names())
            assert not Stubborn.gate.is_set()
            Stubborn.gate.set()
    finally:
        Stubborn.gate.set()

"""The table's contract, call by call: the effects of each method.

test_rref_explore.py has the interleavings.
"""

from typing import Any

import pytest

from telegrad.protocols.rref import (
    Abandon,
    Accept,
    Add,
    Added,
    Confirmed,
    Delete,
    Expect,
    Failed,
    Leak,
    OwnerState,
    Release,
    RRefId,
    RRefProtocolError,
    RRefTable,
    Send,
    Ticket,
    TicketKind,
    UnusableRRefError,
    UserState,
)

X, OWN = RRefId(0, 1), RRefId(1, 7)


def tables(count: int = 3, batch: int = 64) -> list[RRefTable]:
    return [RRefTable(worker, batch) for worker in range(count)]


def settle(group: list[RRefTable], me: int, effects: Any) -> list[Any]:
    """Deliver all sends and the sends that result; return the other effects."""
    seen = []
    for effect in effects:
        if isinstance(effect, Send):
            seen += settle(group, effect.to, group[effect.to].handle(me, effect.message))
        else:
            seen.append(effect)
    return seen


def flush(group: list[RRefTable]) -> list[Any]:
    seen = []
    while any(table.needs_flush for table in group):
        for me, table in enumerate(group):
            seen += settle(group, me, table.flush())
    return seen


def kinds(effects: Any) -> list[tuple[str, Any]]:
    """Return effects with their type, as named tuples with equal fields are equal."""
    return [(type(e.message if isinstance(e, Send) else e).__name__, e) for e in effects]


def created() -> list[RRefTable]:
    """Return X, created by worker 0 at worker 1 and confirmed, with a value."""
    group = tables()
    group[0].begin_create(X, 1)
    group[1].accept_create(X, 0)
    group[1].value_ready(X)
    assert group[0].created(X) == [Confirmed(X)]
    return group


def test_create_and_drop() -> None:
    creator, owner, _ = created()
    assert creator.state_of(X) is UserState.CONFIRMED
    assert owner.state_of(X) is OwnerState.READY
    assert owner.leaks() == [Leak(X, {0: 1})]
    assert creator.drop(X) == ()
    assert kinds(creator.flush()) == [("Release", Send(1, Release(((X, 1),))))]
    assert owner.handle(0, Release(((X, 1),))) == [Delete(X)]
    assert (creator.state_of(X), owner.state_of(X), owner.leaks()) == (None, None, [])


def test_a_fork_pins_its_parent_until_it_is_confirmed() -> None:
    group = created()
    parent, owner, child = group
    ticket = parent.share(X, 2)
    assert ticket.kind is TicketKind.FORK
    parent.drop(X)
    assert not parent.needs_flush  # pinned
    assert kinds(child.receive(ticket, 0)) == [("Add", Send(1, Add(X)))]
    assert child.state_of(X) is UserState.FORKING
    assert kinds(owner.handle(2, Add(X))) == [("Added", Send(2, Added(X)))]
    assert child.handle(1, Added(X)) == [Confirmed(X)]
    assert kinds(child.flush()) == [("Accept", Send(0, Accept((ticket.transfer,))))]
    parent.handle(2, Accept((ticket.transfer,)))
    assert flush(group) == []
    assert owner.leaks() == [Leak(X, {2: 1})]


def test_a_return_makes_the_owner_wait_for_a_creation_it_overtook() -> None:
    creator, owner, _ = tables()
    creator.begin_create(X, 1)
    assert kinds(owner.receive(creator.share(X, 1), 0)) == [("Expect", Send(0, Expect(X)))]
    assert owner.state_of(X) is OwnerState.EXPECTED
    assert owner.stats().expected == 1
    assert creator.handle(1, Expect(X)) == ()  # the creation is in flight
    owner.accept_create(X, 0)
    assert owner.state_of(X) is OwnerState.CREATING


def test_a_placeholder_is_lost_when_its_creation_was_not_sent() -> None:
    creator, owner, _ = tables()
    creator.begin_create(X, 1)
    owner.receive(creator.share(X, 1), 0)
    creator.handle(1, Expect(X))
    effects = creator.create_failed(X, "unpicklable", may_exist=False)
    assert kinds(effects) == [
        ("Failed", Failed(X, "unpicklable", False)),
        ("Abandon", Send(1, Abandon(X, "unpicklable"))),
    ]
    assert owner.handle(0, Abandon(X, "unpicklable")) == [Failed(X, "unpicklable", False)]
    assert owner.failure_of(X) == ("unpicklable", False)
    assert owner.drop(X) == [Delete(X)]


def test_a_creation_that_timed_out_but_came_keeps_its_token_as_long_as_its_handle() -> None:
    creator, _, _ = tables()
    creator.begin_create(X, 1)
    assert creator.create_failed(X, "timed out", may_exist=True) == [Failed(X, "timed out", False)]
    assert creator.stats().pending_users == 1
    with pytest.raises(UnusableRRefError, match="timed out"):
        creator.share(X, 2)
    assert creator.created(X) == ()
    assert creator.state_of(X) is UserState.FAILED  # permanently
    assert not creator.flush()
    creator.drop(X)
    assert kinds(creator.flush()) == [("Release", Send(1, Release(((X, 1),))))]
    assert creator.state_of(X) is None


def test_the_owner_decides_about_its_own_references_alone() -> None:
    owner = RRefTable(1)
    owner.own(OWN)
    assert owner.drop(OWN) == [Delete(OWN)]
    user = RRefTable(0)
    effects = owner.handle(0, Add(OWN))  # deleted, after a death broke the chain of parents
    assert kinds(effects) == [
        ("Failed", Failed(OWN, "it has been deleted by its owner", True)),
        ("Added", Send(0, Added(OWN))),
    ]
    assert user.stats().users == 0
    assert owner.handle(0, Release(((OWN, 1),))) == [Delete(OWN)]


def test_remote_to_the_worker_itself() -> None:
    table = RRefTable(1)
    table.begin_create(OWN, 1)
    assert table.drop(OWN) == ()  # its function runs
    assert table.value_failed(OWN) == [Delete(OWN)]


@pytest.mark.parametrize("owned", [True, False])
def test_a_ticket_to_the_worker_itself_is_a_handle(owned: bool) -> None:
    group = created()
    me, rref = (group[1], OWN) if owned else (group[0], X)
    if owned:
        me.own(OWN)
    received, discarded, unsent = (me.share(rref, me.me) for _ in range(3))
    me.drop(rref)
    assert received.kind is TicketKind.SELF
    assert me.receive(received, me.me) == ()
    assert me.discard(discarded, me.me) == ()
    assert me.unshare(unsent, me.me) == ()
    assert me.stats().handles == 1
    assert me.state_of(rref) is not None
    me.drop(rref)
    flush(group)
    assert me.state_of(rref) is None
    assert me.stats().strays == 0


def test_unshare_and_discard() -> None:
    group = created()
    creator, owner, other = group
    creator.unshare(creator.share(X, 2), 2)
    settle(group, 2, other.discard(creator.share(X, 2), 0))
    flush(group)
    assert other.stats()[:-1] == (0,) * 8
    assert creator.stats().pins == 0
    assert owner.leaks() == [Leak(X, {0: 1})]
    owner.own(OWN)
    owner.unshare(owner.share(OWN, 2), 2)
    assert owner.leaks() == [Leak(X, {0: 1})]


def test_grants_are_counted_and_released_together() -> None:
    group = tables()
    owner, user = group[1], group[2]
    owner.own(OWN)
    for _ in range(3):
        user.receive(owner.share(OWN, 2), 1)
    assert owner.drop(OWN) == ()
    for _ in range(3):
        user.drop(OWN)
    assert kinds(user.flush()) == [("Release", Send(1, Release(((OWN, 3),))))]
    assert owner.handle(2, Release(((OWN, 3),))) == [Delete(OWN)]


def test_a_full_batch_is_sent_without_flush() -> None:
    owner, user = RRefTable(1), RRefTable(2, batch=2)
    sent = []
    for number in range(4):
        rref = RRefId(1, number)
        owner.own(rref)
        user.receive(owner.share(rref, 2), 1)
        sent.append(len(user.drop(rref)))
    assert sent == [0, 1, 0, 1]
    assert user.stats().queued == 0


def test_release_all_ends_a_generation_of_handles() -> None:
    group = created()
    creator, owner, other = group
    born = creator.generation
    settle(group, 2, other.receive(creator.share(X, 2), 0))
    flush(group)
    creator.release_all()
    flush(group)
    assert creator.state_of(X) is None
    creator.receive(other.share(X, 0), 2)  # a late call brings it once more
    creator.drop(X, born)  # the finalizer of the old handle
    assert creator.stats().handles == 1
    creator.drop(X, creator.generation)
    assert (creator.stats().handles, creator.stats().strays) == (0, 0)
    owner.own(OWN)
    owner.release_all()
    assert owner.state_of(OWN) is OwnerState.READY
    assert owner.drop(OWN, 0) == [Delete(OWN)]  # owned references have no generation


def test_the_death_of_a_user() -> None:
    creator, owner, _ = created()
    assert owner.peer_lost(0, "killed") == [Delete(X)]
    assert owner.peer_lost(0, "killed") == ()
    assert creator.state_of(X) is UserState.CONFIRMED


def test_the_death_of_the_owner() -> None:
    creator, _, other = created()
    ticket = creator.share(X, 2)
    assert creator.peer_lost(1, "killed") == [Failed(X, "killed", True)]
    assert (creator.state_of(X), creator.failure_of(X)) == (UserState.LOST, ("killed", True))
    with pytest.raises(UnusableRRefError, match="killed") as caught:
        creator.share(X, 2)
    assert caught.value.lost
    other.peer_lost(1, "killed")
    assert kinds(other.receive(ticket, 0)) == [("Failed", Failed(X, "killed", True))]
    assert other.state_of(X) is UserState.LOST
    creator.drop(X)
    other.drop(X)
    assert (creator.stats().users, other.stats().users) == (0, 0)
    assert creator.begin_create(RRefId(0, 2), 1) == [Failed(RRefId(0, 2), "killed", True)]
    creator.peer_joined(1)
    assert creator.begin_create(RRefId(0, 3), 1) == ()


def test_a_share_to_a_dead_worker_pins_nothing() -> None:
    group = created()
    creator, owner, _ = group
    creator.peer_lost(2, "killed")
    owner.peer_lost(2, "killed")
    owner.own(OWN)
    creator.unshare(creator.share(X, 2), 2)
    owner.unshare(owner.share(OWN, 2), 2)
    creator.drop(X)
    assert flush(group) == [Delete(X)]
    assert owner.drop(OWN) == [Delete(OWN)]
    assert creator.stats().strays == owner.stats().strays == 0


def test_misuse_raises() -> None:
    creator, owner, other = created()
    with pytest.raises(RRefProtocolError, match="exists already"):
        creator.begin_create(X, 1)
    with pytest.raises(RRefProtocolError, match="created twice"):
        owner.accept_create(X, 0)
    with pytest.raises(RRefProtocolError, match="not being created"):
        owner.value_ready(X)
    for refused in (lambda: other.share(X, 0), lambda: other.share(X, 2), lambda: other.adopt(X)):
        with pytest.raises(UnusableRRefError, match="holds no reference"):
            refused()


def test_strays_are_counted_and_do_not_raise() -> None:
    table = RRefTable(0)
    table.drop(X)
    table.handle(1, Added(X))
    table.handle(1, Accept((5,)))
    table.handle(1, Release(((X, 1),)))
    assert table.handle(1, Abandon(X, "")) == ()
    assert table.stats().strays == 4
    table.own(X)
    table.share(X, 1)
    table.handle(1, Release(((X, 9),)))  # more than it holds: no count below zero
    assert table.leaks() == []


def test_calls_without_effects_allocate_nothing() -> None:
    creator = created()[0]
    assert creator.adopt(X) is creator.drop(X) is creator.flush()


def test_a_parent_of_an_ended_session_is_not_accepted_in_the_next() -> None:
    x = RRefId(1, 1)
    table = RRefTable(2)
    table.receive(Ticket(x, 0, TicketKind.FORK, 1), 1)
    table.peer_lost(1, "connection lost")
    table.peer_joined(1)
    table.handle(0, Added(x))
    assert table.state_of(x) is UserState.CONFIRMED
    assert not table.flush()


def test_a_creation_is_lost_with_its_session_before_the_loss_is_handled() -> None:
    x = RRefId(0, 1)
    table = RRefTable(0)
    table.begin_create(x, 1)
    assert table.create_lost(x, "connection lost") == [Failed(x, "connection lost", True)]
    assert table.state_of(x) is UserState.LOST

"""The rules of membership, in every order of joins, leaves and losses."""

from collections.abc import Iterator
from itertools import product

import pytest

from telegrad.protocols.membership import (
    Change,
    GroupView,
    Join,
    Joined,
    Leave,
    Left,
    Lose,
    Lost,
    Member,
    MembershipError,
    incarnation_of,
    ordinal_of,
)


def life(name: str, number: int, ordinal: int = 1) -> Member:
    return Member(name, number, incarnation_of(ordinal, 7))


A, B, C = life("a", 0), life("b", 1), life("c", 2)


def static(size: int, *members: Member) -> GroupView:
    view = GroupView(size)
    view.found(list(members))
    return view


def dynamic(*changes: Change | Member) -> GroupView:
    view = GroupView()
    for change in changes:
        view.apply(Join(change) if isinstance(change, Member) else change)
    return view


def test_incarnations_are_ordered_by_process() -> None:
    assert ordinal_of(incarnation_of(3, 2**32 - 1)) == 3
    assert incarnation_of(2, 0) > incarnation_of(1, 2**32 - 1)


def test_members_join_and_are_found() -> None:
    view = dynamic()
    assert view.apply(Join(A)) == [Joined(A)]
    assert view.apply(Join(B)) == [Joined(B)]
    assert (view.members, view.by_name("b"), view.by_name("c"), view.epoch) == ({0: A, 1: B}, B, None, 2)
    assert view.has(1, B.incarnation)
    assert not view.has(1, B.incarnation + 1)


def test_leaving_and_dying_are_distinguished() -> None:
    view = dynamic(A, B, C)
    assert view.apply(Leave(0, A.incarnation)) == [Left(A)]
    assert view.apply(Lose(1, B.incarnation, "killed")) == [Lost(B, "killed")]
    assert view.apply(Lose(1, B.incarnation, "killed")) == []
    assert view.apply(Leave(1, B.incarnation)) == []
    assert (view.members, view.epoch) == ({2: C}, 7)


def test_a_worker_comes_back() -> None:
    view = static(2, A, B)
    view.apply(Lose(1, B.incarnation, "killed"))
    again = life("b", 1, 2)
    assert view.apply(Join(again, 2)) == [Joined(again)]


def test_a_newer_process_replaces_the_older_one() -> None:
    view = dynamic(A, B)
    again = life("b", 1, 2)
    assert not view.is_superseded(B)
    assert view.apply(Join(again)) == [Lost(B, "a new process has taken the name b"), Joined(again)]
    assert view.is_superseded(B)
    assert not view.is_superseded(again)
    assert view.apply(Lose(1, B.incarnation, "the connection broke")) == []
    assert view.apply(Join(B)) == []
    assert view.members[1] == again


def test_a_name_may_take_another_id() -> None:
    view = dynamic(A)
    moved = life("a", 5, 2)
    assert view.apply(Join(moved)) == [Lost(A, "a new process has taken the name a"), Joined(moved)]
    assert view.members == {5: moved}


def test_an_id_never_gets_another_name() -> None:
    view = dynamic(A, Leave(0, A.incarnation))
    with pytest.raises(MembershipError, match="Rank 0 belonged to worker a, and no other name gets it"):
        view.check(Join(life("x", 0)))
    assert view.apply(Join(life("x", 0))) == []
    assert view.apply(Join(life("a", 0, 2))) == [Joined(life("a", 0, 2))]


def test_skipped_entries_count() -> None:
    view = dynamic(A)
    view.skip()
    assert (view.epoch, view.members) == (2, {0: A})


@pytest.mark.parametrize(
    ("view", "join", "text"),
    [
        (dynamic(B), Join(life("x", 1)), "Rank 1 is taken twice: by workers b and x."),
        (dynamic(B), Join(A, 2), "mixes statically and dynamically initialized members"),
        (static(2, A), Join(B), "RPC group mixes statically and dynamically initialized members which is not"),
        (static(2, A), Join(B, 3), "Worker b was started with world size 3, its group with 2."),
        (static(2, A), Join(life("c", 2), 2), "Worker c has rank 2, but world size is 2."),
        (dynamic(), Join(life("", 0)), "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter"),
        (dynamic(), Join(life("a b", 0)), "chars, but got a b"),
        (dynamic(), Join(life("a" * 128, 0)), "shorter than 128 chars"),
        (dynamic(), Join(life("a\n", 0)), "must match"),
        (dynamic(), Join(life("a", -1)), "Worker a has rank -1, which is not between 0 and 32767."),
        (dynamic(), Join(life("a", 32768)), "rank 32768"),
    ],
)
def test_a_member_that_does_not_fit_is_rejected(view: GroupView, join: Join, text: str) -> None:
    before = dict(view.members)
    with pytest.raises(MembershipError) as refusal:
        view.check(join)
    assert text in str(refusal.value)
    assert view.apply(join) == []
    assert view.members == before


def test_founders_have_names_and_ranks_of_their_own() -> None:
    with pytest.raises(MembershipError, match="name a is not unique"):
        static(2, A, life("a", 1))
    with pytest.raises(MembershipError, match="Rank 0 is taken twice: by workers a and x"):
        static(2, A, life("x", 0))


# ---- every order in which several writers extend one log, with crashes

LIVES = [life("a", 0), life("a", 0, 2), life("b", 1), life("b", 7, 2), life("c", 1)]


def changes() -> Iterator[Change]:
    for member in LIVES:
        yield Join(member)
        yield Leave(member.id, member.incarnation)
        yield Lose(member.id, member.incarnation, "killed")


def check_rules(view: GroupView, before: GroupView, events: list[object]) -> None:
    names = [member.name for member in view.members.values()]
    assert len(set(names)) == len(names)
    for number, member in view.members.items():
        assert (member.id, view.owners[number]) == (number, member.name)
        assert view.latest[member.name] == member.incarnation
    for number, name in before.owners.items():
        assert view.owners[number] == name
    for name, incarnation in before.latest.items():
        assert view.latest[name] >= incarnation
    members = dict(before.members)
    for event in events:  # the events are the difference of the views
        if isinstance(event, Joined):
            members[event.member.id] = event.member
        else:
            assert members.pop(event.member.id) == event.member  # type: ignore[attr-defined]
    assert members == view.members


def copy(view: GroupView) -> GroupView:
    twin = GroupView()
    twin.restore(view.epoch, view.members.values(), dict(view.owners), dict(view.latest))
    return twin


def test_rules_hold_in_every_log() -> None:
    """Apply every log of four entries, and check each state that it leads to."""
    frontier = {(): GroupView()}
    states: dict[object, GroupView] = {}
    for length in range(1, 5):
        following: dict[object, GroupView] = {}
        for view, change in product(frontier.values(), changes()):
            after = copy(view)
            events = after.apply(change)
            assert after.epoch == length
            check_rules(after, view, list(events))
            key = tuple(sorted(after.members.items())), tuple(sorted(after.owners.items())), *after.latest.items()
            following[key] = after
        frontier = following  # type: ignore[assignment]
        states |= following
    assert len(states) > 100

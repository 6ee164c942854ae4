"""The group's view: joins, rejections, and incarnations in any order of events."""

from itertools import permutations

import pytest

from telegrad.protocols.membership import Event, GroupView, Joined, Left, Lost, Member, MembershipError

A, B, C = Member("a", 0), Member("b", 1), Member("c", 2)


def static(size: int, *members: Member) -> GroupView:
    view = GroupView(size)
    for member in members:
        view.join(member._replace(world_size=size))
    return view


def dynamic(*members: Member) -> GroupView:
    view = GroupView()
    for member in members:
        view.join(member)
    return view


def test_members_join_and_are_found() -> None:
    view = dynamic()
    assert view.join(A) == [Joined(A)]
    assert view.join(B) == [Joined(B)]
    assert (view.members, view.by_name("b"), view.by_name("c")) == ({0: A, 1: B}, B, None)


def test_joining_twice_is_joining_once() -> None:
    view = dynamic(A)
    assert view.join(A) == []


def test_a_static_group_knows_when_it_is_complete() -> None:
    view = static(3, A, C)
    assert (view.complete, view.missing()) == (False, [1])
    view.join(B._replace(world_size=3))
    assert (view.complete, view.missing()) == (True, [])
    assert GroupView(0).complete  # 0 means dynamic in torch
    assert GroupView(0).world_size is None


def test_leaving_and_dying_are_distinguished() -> None:
    view = dynamic(A, B, C)
    assert view.leave(0, 0) == [Left(A)]
    assert view.lost(1, 0, "killed") == [Lost(B, "killed")]
    assert view.lost(1, 0, "killed") == []
    assert view.leave(1, 0) == []
    assert view.members == {2: C}


def test_a_name_is_free_again_when_its_worker_is_gone() -> None:
    view = dynamic(A)
    view.leave(0, 0)
    assert view.join(Member("a", 5)) == [Joined(Member("a", 5))]


def test_a_worker_comes_back() -> None:
    view = static(2, A, B)
    view.lost(1, 0, "killed")
    again = Member("b", 1, 1, 2)
    assert view.join(again) == [Joined(again)]


def test_a_worker_is_back_before_its_death_was_noticed() -> None:
    view = dynamic(A, B)
    again = B._replace(incarnation=1)
    assert view.join(again, replaces=True) == [Lost(B, "worker b came back as a new process"), Joined(again)]
    assert view.lost(1, 0, "the connection broke") == []
    assert view.members[1] == again


def test_events_of_an_earlier_incarnation_are_ignored() -> None:
    view = dynamic(A)
    view.lost(1, 3, "died before it was known")
    assert view.join(B) == []
    assert view.join(B._replace(incarnation=3)) == []
    assert 1 not in view.members
    assert view.join(B._replace(incarnation=4)) == [Joined(B._replace(incarnation=4))]


def test_views_agree_whatever_the_order_of_events() -> None:
    """Apply joins and losses of three incarnations in every order."""
    lives = [B._replace(incarnation=n) for n in range(3)]
    news = [("join", life) for life in lives] + [("lost", life) for life in lives[:2]]
    for order in permutations(news):
        view, seen = GroupView(), list[Event]()
        for verb, life in order:
            seen += view.join(life, replaces=True) if verb == "join" else view.lost(1, life.incarnation, "died")
        assert view.members == {1: lives[2]}, order
        joined = [event.member for event in seen if isinstance(event, Joined)]
        lost = [event.member for event in seen if isinstance(event, Lost)]
        assert joined == sorted(set(joined)), order
        assert lost == joined[:-1], order


def test_free_ids() -> None:
    assert dynamic(A, C).free_id() == 1


@pytest.mark.parametrize(
    ("view", "member", "text"),
    [
        (dynamic(A), Member("a", 7), "RPC worker name a is not unique. Workers 0 and 7 share the same name."),
        (dynamic(B), Member("x", 1), "Rank 1 is taken twice: by workers b and x."),
        (dynamic(B), B._replace(world_size=2), "mixes statically and dynamically initialized members"),
        (static(2, A), B, "RPC group mixes statically and dynamically initialized members which is not supported."),
        (static(2, A), B._replace(world_size=3), "Worker b was started with world size 3, its group with 2."),
        (static(2, A), Member("c", 2, 0, 2), "Worker c has rank 2, but world size is 2."),
        (
            dynamic(),
            Member("", 0),
            "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128",
        ),
        (dynamic(), Member("a b", 0), "chars, but got a b"),
        (dynamic(), Member("a" * 128, 0), "shorter than 128 chars"),
        (dynamic(), Member("a\n", 0), "must match"),
        (dynamic(), Member("a", -1), "Worker a has rank -1, which is not between 0 and 32767."),
        (dynamic(), Member("a", 32768), "rank 32768"),
    ],
)
def test_a_member_that_does_not_fit_is_rejected(view: GroupView, member: Member, text: str) -> None:
    before = dict(view.members)
    with pytest.raises(MembershipError) as refusal:
        view.join(member)
    assert text in str(refusal.value)
    assert view.members == before


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_worker_started_twice_is_rejected_while_the_first_replies(incarnation: int) -> None:
    view = static(2, B)
    with pytest.raises(MembershipError, match="Rank 1 is taken: worker b is in the group already"):
        view.join(Member("b", 1, incarnation, 2, process="another"))


def test_two_processes_cannot_be_one_incarnation() -> None:
    view = dynamic(B)
    with pytest.raises(MembershipError, match="Rank 1 is taken"):
        view.join(B._replace(process="another"), replaces=True)

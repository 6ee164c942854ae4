"""The log of a group in seeded schedules.

Workers join, leave, die, restart and read the log late.

An entry may be written after another has made it void: its writer has read an earlier epoch.
"""

import random
from collections import Counter

import pytest
from schedules import run_schedules

from telegrad.protocols.membership import (
    Change,
    GroupView,
    Join,
    Joined,
    Leave,
    Lose,
    Member,
    MembershipError,
    incarnation_of,
)

NAMES = ("a", "b", "c", "d")


def random_change(rng: random.Random, writer: GroupView, ordinals: Counter[str]) -> Change | None:
    members = list(writer.members.values())
    if not members or rng.random() < 0.5:
        name = rng.choice(NAMES)
        ordinals[name] += rng.random() < 0.8  # else an entry of a process that was replaced, or twice the same
        join = Join(Member(name, rng.randrange(5), incarnation_of(max(ordinals[name], 1), 0)))
        try:
            writer.check(join)
        except MembershipError:
            return None
        return join
    member = rng.choice(members)
    if rng.random() < 0.5:
        return Leave(member.id, member.incarnation)
    return Lose(member.id, member.incarnation, "lease expired")


def run_membership(seed: int) -> None:
    rng = random.Random(f"membership {seed}")
    ordinals: Counter[str] = Counter()
    views = [GroupView() for _ in range(3)]
    log: list[Change] = []
    states: dict[int, object] = {}
    begun, ended, owners = set(), set(), dict[int, str]()
    for _ in range(40):
        view = rng.choice(views)
        if rng.random() < 0.5:
            change = random_change(rng, view, ordinals)
            if change is not None:
                log.append(change)
        elif view.epoch < len(log):
            events = view.apply(log[view.epoch])
            names = [member.name for member in view.members.values()]
            assert len(set(names)) == len(names), "M1: a name is there once"
            assert states.setdefault(view.epoch, dict(view.members)) == view.members, "M2: views of an epoch agree"
            for member in view.members.values():
                assert owners.setdefault(member.id, member.name) == member.name, "M1: an id keeps its name"
            for event in events if view is views[0] else ():
                life = event.member.name, event.member.incarnation
                if isinstance(event, Joined):
                    assert life not in begun, "M3: a process joins once"
                    assert all(other[1] < life[1] for other in begun if other[0] == life[0]), "M3: newer replace older"
                    begun.add(life)
                else:
                    assert life in begun - ended, "M3: a process ends once, after it has joined"
                    ended.add(life)


def test_views_agree() -> None:
    assert run_schedules(run_membership, range(300)) == 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_views_agree_in_many_schedules() -> None:
    assert run_schedules(run_membership, range(1000, 21000)) == 20_000

"""The table of members forgets workers that have left."""

import pytest

from telegrad.errors import UnknownWorker, WorkerLost
from telegrad.group.rendezvous import Member
from telegrad.types import WorkerInfo
from telegrad.worker.membership.members import MAX_RETIRED, Members


def member(number: int, name: str = "") -> Member:
    return Member(number, name or f"w{number}", number, [], "host")


def test_the_workers_that_left_first_are_forgotten() -> None:
    members = Members(WorkerInfo("me", 0), lambda: None)
    before = sizes(members)
    for number in range(1, 2 * MAX_RETIRED + 1):
        members.add(member(number))
        members.mark_connected(number, number)
        members.mark_lost(number, number, "killed", departed=number % 2 == 0)
        members.retire(number, "killed")
    assert max(sizes(members).values()) <= 2 * MAX_RETIRED + max(before.values())  # by name and by id
    assert members.name_of(1) == "(id 1)"
    with pytest.raises(UnknownWorker):
        members.resolve("w1")
    last = 2 * MAX_RETIRED
    assert members.name_of(last) == f"w{last}"
    with pytest.raises(WorkerLost, match="killed"):
        members.resolve(f"w{last}")


def test_a_name_that_died_again_keeps_its_last_end() -> None:
    members = Members(WorkerInfo("me", 0), lambda: None)
    for number, why in ((1, "first"), (2, "second")):
        members.add(member(number, "again"))
        members.retire(number, why)
    for number in range(3, MAX_RETIRED + 2):  # the first one is forgotten
        members.add(member(number))
        members.retire(number)
    assert members.name_of(1) == "(id 1)"
    with pytest.raises(WorkerLost, match="second"):
        members.resolve("again")


def sizes(members: Members) -> dict[str, int]:
    return {name: len(value) for name, value in vars(members).items() if isinstance(value, dict | set)}

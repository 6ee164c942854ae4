"""The set of settled runs of a caller."""

import random

from hypothesis import given
from hypothesis import strategies as st

from telegrad.worker.calls.settled import MOST_LISTED, Settled


def test_gaps_stay_open() -> None:
    settled = Settled()
    assert 0 not in settled
    settled.add((3, 7))
    assert [number in settled for number in (2, 3, 4, 6, 7, 8)] == [True, False, True, True, False, False]
    settled.add((3, 9))
    assert [number in settled for number in (3, 7, 8, 9)] == [False, True, True, False]


def test_runs_up_to_a_number() -> None:
    settled = Settled()
    settled.add((3, 7, 20))
    settled.add_up_to(5)
    assert [number in settled for number in (3, 5, 6, 7, 20)] == [True, True, True, False, False]
    settled.add_up_to(30)
    assert 30 in settled
    assert 31 not in settled


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_lists_in_any_order(random: random.Random, steps: int) -> None:
    number, open_runs = 0, list[int]()
    lists: list[tuple[int, ...]] = []
    for _ in range(steps):
        number += random.randint(1, 3)
        open_runs.append(number)
        for each in random.sample(open_runs, random.randint(0, len(open_runs) - 1)):
            if random.random() < 0.5:
                open_runs.remove(each)
        lists.append(tuple(open_runs[:MOST_LISTED]))
    random.shuffle(lists)
    settled, union = Settled(), set[int]()
    for listed in lists:
        settled.add(listed)
        union |= set(range(listed[-1])) - set(listed)
        assert {n for n in range(number + 2) if n in settled} == union
        assert len(settled._open) <= MOST_LISTED
    assert union.isdisjoint(open_runs)

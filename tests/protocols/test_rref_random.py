"""Seeded random schedules over four and five workers, with losses.

A failure prints its seed and a trace; `replay(random_scenario(seed, losses), trace)` of rref_explorer runs it again.
"""

import pytest
from rref_explorer import random_scenario, wander

CHUNK = 50


def run(first: int, losses: bool) -> int:
    return sum(wander(random_scenario(seed, losses), seed) for seed in range(first, first + CHUNK))


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_without_losses(first: int) -> None:
    assert run(first, losses=False) > CHUNK * 20


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_with_losses(first: int) -> None:
    assert run(first, losses=True) > CHUNK * 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("losses", [False, True])
def test_thousands_of_schedules(losses: bool) -> None:
    for first in range(1000, 6000, CHUNK):
        run(first, losses)

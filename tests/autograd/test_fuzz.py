"""Random programs on simulated workers, with every order of delivery, against the same program in one place."""

import pytest
from programs import Program, compare, distributed, local

CHUNK = 60


def try_seeds(first: int, count: int) -> None:
    for seed in range(first, first + count):
        program = Program(seed)
        expected = local(program)
        found, _ = distributed(program, seed)
        compare(program, expected, found)


@pytest.mark.parametrize("first", range(0, 240, CHUNK))
def test_random_programs(first: int) -> None:
    try_seeds(first, CHUNK)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 13000, 1000))
def test_thousands_of_random_programs(first: int) -> None:
    try_seeds(first, 1000)

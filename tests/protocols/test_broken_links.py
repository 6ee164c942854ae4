"""References, backward passes and shutdowns on links that break.

The links break between living workers, in seeded schedules.
"""

import dataclasses
import random

import backward_world
import pytest
import rref_explorer
import shutdown_world
from rref_scenarios import BEGUN, CREATE, OWN, X, world
from rref_world import Scenario
from schedules import run_schedules
from test_backward import SMALL

CUTS = {
    "create": world((CREATE,), (), (), timeouts=True, cuts=2, late=True),
    "fork": world((CREATE, ("share", X, 2)), (), (), cuts=1, late=True),
    "return": world((CREATE, ("share", X, 1)), (), (), cuts=1),
    "grant": world((), (("own", OWN), ("share", OWN, 0)), (), cuts=2, late=True),
    "unshared in the next session": world(
        (), (("own", OWN), ("hold", OWN, 0), ("share", OWN, 0), ("unhold",)), (), cuts=1
    ),
    **BEGUN,
}


@pytest.mark.parametrize("name", CUTS)
def test_every_interleaving_with_broken_links(name: str) -> None:
    assert rref_explorer.explore(CUTS[name]) > 100


def scenario_with_links(seed: int) -> Scenario:
    """Return random programs, on links that break, with partitions and restarts."""
    rng = random.Random(f"links {seed}")
    scenario = rref_explorer.random_scenario(seed, losses=rng.random() < 0.5)
    return dataclasses.replace(scenario, cuts=rng.randint(1, 4), splits=rng.randint(0, 1), late=rng.random() < 0.5)


def run_references(seed: int) -> None:
    rref_explorer.wander(scenario_with_links(seed), seed)


def run_backward(seed: int) -> None:
    program = backward_world.random_program(seed, losses=seed % 3 == 0, failures=seed % 5 == 0)
    backward_world.wander(program._replace(subgraphs=seed % 2 == 0, cuts=1 + seed % 3), seed)


def run_shutdown(seed: int) -> None:
    shutdown_world.wander(seed)


RUNS = [(run_references, 200, 25_000), (run_backward, 300, 40_000), (run_shutdown, 300, 20_000)]


@pytest.mark.parametrize(("run", "few"), [(run, few) for run, few, _ in RUNS])
def test_schedules(run, few: int) -> None:
    assert run_schedules(run, range(few)) == few


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("run", "many"), [(run, many) for run, _, many in RUNS])
def test_many_schedules(run, many: int) -> None:
    assert run_schedules(run, range(1000, 1000 + many)) == many


@pytest.mark.parametrize("subgraphs", [False, True], ids=["whole", "in subgraphs"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (program.workers > 2)) for name, program in SMALL.items()],
)
def test_every_broken_link_of_a_backward_pass(name: str, subgraphs: bool) -> None:
    program = SMALL[name]._replace(subgraphs=subgraphs, cuts=1)
    if program.workers > 1:
        assert backward_world.explore(program) > 5

"""Random programs on simulated workers, compared with one process."""

import random
from typing import Any

import pytest
import torch
from random_programs import Program, compare, distributed, local
from simulated_group import Group

from telegrad.errors import WorkerLost

CHUNK = 60


def agree(seed: int) -> None:
    program = Program(seed)
    expected = local(program)
    found, _ = distributed(program, seed)
    compare(program, expected, found)


@pytest.mark.parametrize("first", range(0, 240, CHUNK))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + CHUNK):
        agree(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 13000, 1000))
def test_thousands_of_random_programs(first: int) -> None:
    for seed in range(first, first + 1000):
        agree(seed)


def gradients(seed: int, network: int) -> list[torch.Tensor]:
    """Return the gradients of a program with inexact floating-point sums."""
    program = Program(seed, floats=True)
    found, _ = distributed(program, network)
    return [grad.to_dense() for grad in found.gradients.values() if grad is not None]


def test_two_runs_agree_bit_for_bit() -> None:
    """Sums have the same order in whatever order gradients arrive."""
    for seed in range(60):
        first = gradients(seed, 1)
        for network in (2, 3, 4):
            again = gradients(seed, network)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"seed {seed}, network {network}"


class Oops(Exception):
    pass


def fail_randomly(seed: int) -> str:
    """Run a pass in which a hook fails or a worker dies; return how it ended."""
    rng = random.Random(f"trouble {seed}")
    program = Program(seed)
    group = Group(program.workers, seed)
    root, roots, leaves, _ = program.run(group.transfer)
    if not roots:
        return "nothing to do"
    victim = rng.choice(list(leaves.values()))
    dies = rng.randrange(program.workers) if rng.random() < 0.6 else None
    if dies is None:

        def fail(grad: torch.Tensor) -> None:
            raise Oops("a hook fails")

        victim.register_hook(fail)
    number = group.begin(root, roots)
    moment = rng.randrange(8)
    while group.net or (dies is not None and not group.dead):
        if dies is not None and not group.dead and (moment == 0 or not group.net):
            group.kill(dies)
        elif group.dead and (not group.net or rng.random() < 0.3):
            break
        else:
            group.deliver()
        moment -= 1
    if group.dead:
        for worker in rng.sample(range(program.workers), program.workers):
            if worker not in group.dead:
                for _ in range(rng.randrange(3)):
                    if group.net:
                        group.deliver()
                group.report_loss(worker, dies)
    group.settle()
    ended = group.results.get(number)
    if root in group.dead or (ended and ended[0] is not None):
        for (worker, _), part in group.passes.items():
            assert worker in group.dead or part.is_over or not part.holds_graph, (
                f"seed {seed}: worker {worker} waits for ever"
            )
    if root in group.dead:
        return "dead root"
    try:
        group.result(number)
    except (Oops, WorkerLost) as raised:
        error: Any = raised
    else:
        return "done"
    if isinstance(error, Oops):
        assert "a hook fails" in str(error), f"seed {seed}"
        return "hook"
    assert error.name == f"w{dies}", f"seed {seed}"
    return "lost"


def fail_often(seeds: range) -> None:
    ends = [fail_randomly(seed) for seed in seeds]
    assert {"hook", "lost", "done", "dead root"} <= set(ends)


def test_failing_hooks_and_lost_workers() -> None:
    fail_often(range(250))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_failures() -> None:
    fail_often(range(1000, 11000))

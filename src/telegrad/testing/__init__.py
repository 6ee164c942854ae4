"""Helpers for tests of programs that use Telegrad.

- `cluster`: a group of workers in this process, started in milliseconds.
- `processes`: the same function in several processes, with a deadline that reports stacks instead of a hang.
- `Local`, `Gate`, `eventually`: tests that wait on events, never on sleep.
- `gradcheck`: compares a model spread over workers with the same model in one process.
- `assert_nothing_left`, `Footprint`: checks for leaks.
"""

from telegrad.testing.clusters import Cluster, cluster
from telegrad.testing.gradcheck import GradcheckError, gradcheck
from telegrad.testing.leaks import Footprint, LeakError, assert_nothing_left
from telegrad.testing.processes import ProcessError, Processes, processes
from telegrad.testing.waiting import Gate, Local, eventually, run_all

__all__ = [
    "Cluster",
    "Footprint",
    "Gate",
    "GradcheckError",
    "LeakError",
    "Local",
    "ProcessError",
    "Processes",
    "assert_nothing_left",
    "cluster",
    "eventually",
    "gradcheck",
    "processes",
    "run_all",
]

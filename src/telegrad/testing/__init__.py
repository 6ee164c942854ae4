"""Helpers for tests of programs that use Telegrad.

- `cluster`: a group of workers in this process, started in milliseconds.
- `processes`: the same function in several processes, with a deadline that reports stacks instead of a hang.
- `Local`, `Gate`, `eventually`: tests that wait on events, never on sleep.
- `faults`: rules that lose, delay or corrupt messages, or cut connections.
- `gradcheck`: compares a model spread over workers with the same model in one process.
- `assert_quiescent`, `ResourceSnapshot`: checks for leaks.
"""

from telegrad.testing import faults
from telegrad.testing.clusters import Cluster, cluster
from telegrad.testing.gradcheck import GradcheckError, gradcheck
from telegrad.testing.leaks import LeakError, ResourceSnapshot, assert_quiescent
from telegrad.testing.processes import ProcessError, Processes, processes
from telegrad.testing.waiting import Gate, Local, eventually, run_all

__all__ = [
    "Cluster",
    "Gate",
    "GradcheckError",
    "LeakError",
    "Local",
    "ProcessError",
    "Processes",
    "ResourceSnapshot",
    "assert_quiescent",
    "cluster",
    "eventually",
    "faults",
    "gradcheck",
    "processes",
    "run_all",
]

"""For tests of programs that use Telegrad: whole groups in one process, groups of processes, and checks for leaks.

- `cluster`: a group of workers in this process, in milliseconds.
- `processes`: the same function in several processes, with a deadline that leaves stacks instead of a hang.
- `Local`, `Gate`, `eventually`: tests that wait on events, never on sleep.
- `gradcheck`: a model spread over workers against itself in one process.
- `assert_nothing_left`, `Footprint`: nothing is left behind.
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

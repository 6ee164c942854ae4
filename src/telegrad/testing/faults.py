"""Faults of connections between workers, for tests of programs that use Telegrad.

A worker applies rules if its option ``faults`` (or the environment variable TELEGRAD_FAULTS) has a `Plan`, which may be
empty. Then rules can also be added while it runs. The functions of this module are about all such workers of this
process that are open: in a group of processes, call them in the process of the worker that sends::

    plan = faults.Plan(seed=1)
    with cluster(2, rpc.Options(faults=str(plan))):
        faults.add(faults.Rule("delay", "w1", "w0", "value"))
        future = rpc.rpc_async("w1", max, (1, 2))
        faults.wait(1)
        assert not future.done()
        faults.release()
        assert future.wait() == 2
"""

import time
from collections.abc import Iterator

from telegrad.rpc import Worker
from telegrad.worker import live_workers
from telegrad.worker.fault_rules import ACTIONS, KINDS, AppliedFault, Plan, Rule, WorkerFaults

__all__ = ["ACTIONS", "KINDS", "AppliedFault", "Plan", "Rule", "add", "applied", "clear", "release", "remove", "wait"]


def _workers() -> Iterator[WorkerFaults]:
    found = [worker.faults for worker in live_workers() if not worker.closed and worker.faults is not None]
    if not found:
        raise RuntimeError(
            "no worker of this process applies fault rules: before it starts, give it the option faults, or set"
            " TELEGRAD_FAULTS (faults=str(faults.Plan()) for rules that are added later)"
        )
    return iter(sorted(found, key=lambda each: each.name))


def add(*rules: Rule) -> None:
    """Add rules to the workers of this process that they are about.

    They count messages from now on.

    Raises:
        RuntimeError: No worker of this process applies rules.
        ValueError: A rule is impossible on the worker's transports.

    Example::

        from telegrad.testing import cluster, faults

        with cluster(2, rpc.Options(faults=str(faults.Plan()))):
            faults.add(faults.Rule("delay", "w0", "w1", "call", seconds=0.1))
            assert rpc.rpc_sync("w1", max, (1, 2)) == 2  # 0.1 s later
    """
    for each in _workers():
        each.add(rules)


def remove(rule: Rule) -> bool:
    """Remove a rule, and return whether a worker of this process had it.

    Raises:
        RuntimeError: No worker of this process applies rules.

    Example::

        from telegrad.testing import cluster, faults

        slow = faults.Rule("delay", "w1", "w0", count=None, seconds=0.1)
        with cluster(2, rpc.Options(faults=str(faults.Plan([slow])))):
            assert faults.remove(slow)
    """
    return sum(each.remove(rule) for each in _workers()) > 0


def clear() -> None:
    """Remove all rules, and release what they hold back.

    Raises:
        RuntimeError: No worker of this process applies rules.

    Example::

        from telegrad.testing import cluster, faults

        cut = faults.Rule("cut", "w0", "w1", count=None)
        with cluster(2, rpc.Options(faults=str(faults.Plan([cut])))):
            faults.clear()
            assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    """
    for each in _workers():
        each.native.clear()
    release()


def release() -> None:
    """Release the messages that a ``delay`` holds back now.

    Raises:
        RuntimeError: No worker of this process applies rules.

    Example::

        from telegrad.testing import cluster, faults

        hold = faults.Rule("delay", "w1", "w0", "value")
        with cluster(2, rpc.Options(faults=str(faults.Plan([hold])))):
            future = rpc.rpc_async("w1", max, (1, 2))
            faults.wait(1, timeout=5)
            faults.release()
            assert future.wait() == 2
    """
    for each in _workers():
        each.native.release()


def applied(worker: Worker | None = None) -> list[AppliedFault]:
    """Return what the rules have done so far.

    Args:
        worker: A worker of this process, which may have shut down; by default, all open ones, ordered by name.

    Returns:
        The faults, for each worker in the order in which they happened.

    Raises:
        RuntimeError: No worker of this process applies rules.

    Example::

        from telegrad.testing import cluster, faults

        slow = faults.Rule("delay", "w0", "w1", "call", nth=2, seconds=0.1)
        with cluster(2, rpc.Options(faults=str(faults.Plan([slow])))):
            for _ in range(3):
                rpc.rpc_sync("w1", max, (1, 2))
            (fault,) = faults.applied()
            assert (fault.source, fault.destination, fault.nth, fault.transport) == ("w0", "w1", 2, "shm")
    """
    if worker is None:
        return [fault for each in _workers() for fault in each.applied()]
    if worker._worker.faults is None:
        raise RuntimeError(f"worker {worker.info.name} applies no fault rules: it has no option faults")
    return worker._worker.faults.applied()


def wait(count: int, timeout: float = 30.0) -> None:
    """Wait until `count` faults have been applied by the workers of this process.

    Args:
        count: number of faults since the workers started.
        timeout: limit in seconds.

    Raises:
        AssertionError: That has not happened in time.
        RuntimeError: No worker of this process applies rules.

    Example::

        from telegrad.testing import cluster, faults

        hold = faults.Rule("delay", "w1", "w0", "value")
        with cluster(2, rpc.Options(faults=str(faults.Plan([hold])))):
            future = rpc.rpc_async("w1", max, (1, 2))
            faults.wait(1, timeout=5)
            assert not future.done()
            faults.release()
    """
    deadline = time.monotonic() + timeout
    while True:
        workers = list(_workers())
        found = [len(each.applied()) for each in workers]
        if sum(found) >= count:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise AssertionError(f"{sum(found)} of {count} faults within {timeout} s: {applied()}")
        # Of several workers, any may be next: wait for one of them for a moment only.
        pause = left if len(workers) == 1 else min(left, 0.005)
        workers[0].native.wait(found[0] + 1, int(pause * 1e9))

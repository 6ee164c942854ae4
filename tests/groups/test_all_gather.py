"""Operations of all workers together, while some of them leave."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from telegrad.errors import TelegradError
from telegrad.rpc import Worker
from telegrad.rpc.api import _all_gather
from telegrad.rpc.collectives import LeftWhileGathering, LostWhileGathering, gathering_of
from telegrad.testing import Cluster, cluster, eventually, run_all

TIMEOUT = 20.0  # s
WHOLE = {"w0": 0, "w1": 1, "w2": 2}


def gather(group: Cluster, rank: int, names: set[str]) -> Any:
    """Return the result on one worker, or its error."""
    with group[rank]:
        try:
            return _all_gather(rank, names)
        except TelegradError as e:
            return e


def waits(group: Cluster, rank: int) -> bool:
    return bool(group[rank]._worker.members.listeners)


def leave(group: Cluster, rank: int) -> None:
    """Leave the group, and wait until the other workers have noticed."""
    others = [worker._worker for i, worker in enumerate(group) if i != rank]
    taken_up = threading.Semaphore(0)
    for other in others:
        other.members.listeners.append(taken_up.release)
    group[rank].shutdown(graceful=not group[rank]._worker.static)  # a static group would wait for the other workers
    for _ in others:
        assert taken_up.acquire(timeout=TIMEOUT)


@pytest.fixture(params=["static", "dynamic"])
def four(request: pytest.FixtureRequest) -> Any:
    with cluster(4, dynamic=request.param == "dynamic", graceful=False) as group:
        for one in group:
            for other in group:
                one.rpc_sync(other.info.id, abs, (-1,))
        yield group


def run_concurrently(*functions: Callable[[], Any]) -> list[Any]:
    return run_all(functions, TIMEOUT)


def test_the_end_of_an_uninvolved_worker_is_ignored(four: Cluster) -> None:
    def others() -> Any:
        eventually(lambda: waits(four, 0) and waits(four, 1))
        leave(four, 3)
        return gather(four, 2, set(WHOLE))

    first = (partial(gather, four, i, set(WHOLE)) for i in range(2))
    assert run_concurrently(*first, others) == [WHOLE] * 3


def test_the_end_of_an_involved_worker_fails_all(four: Cluster) -> None:
    names = {"w0", "w1", "w3"}

    def others() -> None:
        eventually(lambda: waits(four, 0) and waits(four, 1))
        leave(four, 3)

    first, second, _ = run_concurrently(lambda: gather(four, 0, names), lambda: gather(four, 1, names), others)
    assert isinstance(first, LeftWhileGathering)
    assert isinstance(second, LeftWhileGathering)
    assert "w3" in str(first)
    assert str(first) == str(second)


def test_a_later_participant_fails_too(four: Cluster) -> None:
    names = {"w0", "w1", "w3"}
    leave(four, 3)
    assert isinstance(gather(four, 0, names), LeftWhileGathering)
    eventually(lambda: gathering_of(four[1]._worker).states)
    assert isinstance(gather(four, 1, names), LeftWhileGathering)


def test_a_worker_that_rejoins_is_waited_for() -> None:
    with cluster(3, dynamic=True) as group:
        leave(group, 2)
        group.workers[2] = Worker("w2", 7, None, store=group.store)
        assert run_concurrently(*(partial(gather, group, i, set(WHOLE)) for i in range(3))) == [WHOLE] * 3


def test_the_leader_notices_the_end_of_an_unconnected_worker() -> None:
    with cluster(2, graceful=False) as two:
        two[1].shutdown(graceful=False)
        found = gather(two, 0, {"w0", "w1"})
    assert isinstance(found, LostWhileGathering)

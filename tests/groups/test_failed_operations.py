"""Group operations after an error on some of the workers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.api import _all_gather
from telegrad.rpc.gathering_handlers import gathering_of
from telegrad.testing import Cluster, Gate, cluster, eventually, faults, run_all

TIMEOUT = 20.0  # s
SOON = 0.2  # s; of waits that are meant to end


def call_all(group: Cluster) -> None:
    """Call each operation on all workers: each has the values of this call."""
    for turn in range(2):
        expected = {f"w{rank}": (turn, rank) for rank in range(len(group))}
        assert group.on_each(lambda rank: rpc.all_gather((turn, rank), timeout=TIMEOUT)) == [expected] * len(group)  # noqa: B023
        for source in range(len(group)):
            sent = group.on_each(lambda rank: rpc.broadcast((turn, rank), source, timeout=TIMEOUT))  # noqa: B023
            assert sent == [(turn, source)] * len(group)
    assert [gathering_of(worker._worker).operations for worker in group] == [[]] * len(group)
    eventually(lambda: [gathering_of(worker._worker).open_offers for worker in group] == [{}] * len(group))


OPERATIONS: dict[str, Callable[[], object]] = {
    "all_gather": lambda: rpc.all_gather("old", timeout=SOON),
    "barrier": lambda: rpc.barrier(timeout=SOON),
    "broadcast": lambda: rpc.broadcast("old", "w0", timeout=SOON),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("late", [{0}, {1}, {2}, {1, 2}, {0, 2}])
def test_one_more_call_after_some_timed_out(operation: str, late: set[int]) -> None:
    """The others never call the operation that has timed out."""
    with cluster(3) as group:
        for rank in {0, 1, 2} - late:
            with group[rank], pytest.raises(TimeoutError, match="timed out in _all_gather"):
                OPERATIONS[operation]()
        call_all(group)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_worker_passes_with_one_that_has_given_up(operation: str) -> None:
    with cluster(3) as group:
        with group[1], pytest.raises(TimeoutError):
            OPERATIONS[operation]()

        def one(rank: int) -> Callable[[], Any]:
            def use() -> Any:
                with group[rank], pytest.raises(TimeoutError):
                    OPERATIONS[operation]()

            return use

        run_all([one(0), one(2)])
        call_all(group)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_worker_that_gives_up_withdraws_its_offer(operation: str) -> None:
    with cluster(2) as group:
        with group[1], pytest.raises(TimeoutError):
            OPERATIONS[operation]()
        eventually(lambda: gathering_of(group[0]._worker).open_offers == {})


def test_an_offer_whose_withdrawal_is_lost_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.rpc.collectives._withdraw_from", lambda *_: None)
    with cluster(3) as group:
        with group[1], pytest.raises(TimeoutError):
            rpc.all_gather("old", timeout=SOON)
        leader = gathering_of(group[0]._worker)
        assert list(leader.open_offers.values()) == ["old"]

        def again() -> Any:
            eventually(lambda: list(leader.open_offers.values()) == [2])  # the leader has asked w1
            with group[1]:
                return rpc.all_gather("new", timeout=TIMEOUT)

        def one(rank: int) -> Callable[[], Any]:
            def use() -> Any:
                with group[rank]:
                    return rpc.all_gather(rank, timeout=TIMEOUT)

            return use

        assert run_all([one(0), one(2), again]) == [{"w0": 0, "w1": "new", "w2": 2}] * 3


def test_a_worker_that_waits_meets_the_next_call_of_the_leader() -> None:
    with cluster(2) as group:
        leader = gathering_of(group[0]._worker)

        def lead() -> Any:
            with group[0], pytest.raises(TimeoutError):
                rpc.all_gather("old", timeout=SOON)
            has_failed.set()
            with group[0]:
                return rpc.all_gather("new", timeout=TIMEOUT)

        def follow() -> Any:
            assert has_failed.wait(TIMEOUT)
            with group[1]:
                return rpc.all_gather(1, timeout=TIMEOUT)

        has_failed = threading.Event()
        assert run_all([lead, follow]) == [{"w0": "new", "w1": 1}] * 2
        assert leader.operations == []


@pytest.mark.parametrize("waiting", [0, 1])
def test_operations_after_the_loss_of_a_session(waiting: int) -> None:
    plan = str(faults.Plan([faults.Rule("cut", "w1", "w0", "value", nth=1)]))
    with cluster(2, rpc.Options(faults=plan, resume=False), check=False, graceful=False) as group:
        gathering = gathering_of(group[waiting]._worker)

        def wait() -> None:
            with group[waiting], pytest.raises(WorkerLost) as caught:
                rpc.barrier(timeout=TIMEOUT)
            assert caught.value.name == f"w{1 - waiting}"
            assert caught.value.incarnation

        def cut() -> None:
            eventually(lambda: gathering.operations)
            eventually(lambda: waiting == 0 or gathering_of(group[0]._worker).open_offers)
            with pytest.raises(WorkerLost):
                group[0].rpc_sync("w1", abs, (-1,))

        run_all([wait, cut])
        for rank in (0, 1):
            eventually(lambda: 1 - rank in group[rank]._worker.members.lost)  # noqa: B023
        call_all(group)


def test_threads_take_turns() -> None:
    """The operations of one worker with the same workers come one after the other."""
    with cluster(2) as group:

        def one(rank: int) -> Callable[[], Any]:
            def use() -> Any:
                with group[rank]:
                    return [rpc.all_gather(rank, timeout=TIMEOUT) for _ in range(5)]

            return use

        assert run_all([one(rank) for rank in (0, 1) for _ in range(3)]) == [[{"w0": 0, "w1": 1}] * 5] * 6


def test_a_late_call_fails_the_leader_of_an_operation_without_limit() -> None:
    """Keep torch's rule: the limit is one of the messages; the leader has none."""
    with cluster(2, rpc.Options(num_worker_threads=1, rpc_timeout=0.2)) as group:
        gate = Gate()
        busy = group[1].rpc_async("w0", gate.enter, timeout=0)
        gate.wait_for()
        with group[1], pytest.raises(RpcTimeout, match="a group operation on w0"):
            _all_gather("late")
        gate.open()
        busy.wait()
        eventually(lambda: gathering_of(group[0]._worker).open_offers)
        with group[0], pytest.raises(TelegradError, match=r"\['w1'\] timed out in _all_gather after 0\.20 seconds"):
            _all_gather("leader")
        assert group.on_each(lambda rank: _all_gather(rank, timeout=TIMEOUT)) == [{"w0": 0, "w1": 1}] * 2

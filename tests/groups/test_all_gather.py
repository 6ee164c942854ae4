"""Operations of all workers together, while some of them leave."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import TelegradError, WorkerLost
from telegrad.protocols.membership import incarnation_of
from telegrad.rpc import Worker, gathering_failures
from telegrad.rpc.api import _all_gather
from telegrad.rpc.gathering import Gathering
from telegrad.rpc.gathering_failures import LeftWhileGathering, LostWhileGathering, find_loss
from telegrad.rpc.gathering_handlers import gathering_of
from telegrad.testing import Cluster, cluster, eventually, faults, run_all

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


def kept(group: Cluster) -> list[object]:
    """Return what the workers keep of operations."""
    all_of = [gathering_of(worker._worker) for worker in group]
    return [each for gathering in all_of for each in (*gathering.operations, *gathering.open_offers)]


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
    assert (first.name, first.why, first.incarnation) == (second.name, second.why, second.incarnation)
    assert first.name == "w3"
    assert first.left
    assert first.incarnation


def test_a_later_participant_fails_too(four: Cluster) -> None:
    names = {"w0", "w1", "w3"}
    leave(four, 3)
    assert isinstance(gather(four, 0, names), LeftWhileGathering)
    found = gather(four, 1, names)
    assert isinstance(found, LeftWhileGathering)
    assert (found.name, found.left) == ("w3", True)
    assert kept(four) == []


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


# ---- broken connections


CUT = str(faults.Plan([faults.Rule("cut", "w1", "w0", "value", nth=1)]))


def break_connection(group: Cluster) -> None:
    """Break the connection of w0 and w1, and wait until both have noticed."""
    with pytest.raises(WorkerLost):
        group[0].rpc_sync("w1", abs, (-1,))
    for rank in (0, 1):
        eventually(lambda: 1 - rank in group[rank]._worker.members.lost)  # noqa: B023


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_broken_connection_to_a_live_member_is_no_loss(dynamic: bool) -> None:
    with cluster(3, rpc.Options(faults=CUT, resume=False), dynamic=dynamic, check=False) as group:
        break_connection(group)
        run_operations(group)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_cannot_be_reached_again_is_lost(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's log has not lost it yet."""
    monkeypatch.setattr(gathering_failures, "_is_member", lambda worker, peer: True)
    with cluster(2, rpc.Options(faults=CUT, resume=False), graceful=False, check=False) as group:
        break_connection(group)
        group[1 - rank]._worker.close()
        assert isinstance(gather(group, rank, {"w0", "w1"}), (LostWhileGathering, WorkerLost))


# ---- workers that come back


def replace(group: Cluster, rank: int) -> None:
    """Replace a worker by another process, of which all others know."""
    leave(group, rank)
    group.workers[rank] = Worker(f"w{rank}", store=group.store)
    newest = group[rank]._worker.incarnation
    for worker in group:
        eventually(lambda: worker._worker is group[rank]._worker or knows(worker, rank, newest))  # noqa: B023


def knows(worker: Worker, rank: int, incarnation: int) -> bool:
    member = worker._worker.members.get(rank)
    return member is not None and member.incarnation == incarnation


def run_operations(group: Cluster) -> None:
    """Run each operation twice, on all workers; no value is kept."""
    names = [f"w{rank}" for rank in range(len(group))]
    for turn in range(2):
        values = group.on_each(lambda rank: rpc.all_gather(rank, names, TIMEOUT))
        assert values == [{name: rank for rank, name in enumerate(names)}] * len(group)
        for source in range(len(group)):
            sent = group.on_each(lambda rank: rpc.broadcast((turn, rank), source, names, TIMEOUT))  # noqa: B023
            assert sent == [(turn, source)] * len(group)
    assert kept(group) == []


def make_late(worker: Worker) -> None:
    """Have a worker know only the processes of now."""
    gathering = gathering_of(worker._worker)
    ordinals = {name: gathering._known((name,))[0] for name in WHOLE}
    gathering._known = lambda names: tuple(ordinals[name] for name in names)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_operations_with_a_worker_that_came_back(rank: int) -> None:
    with cluster(3, dynamic=True) as group:
        run_operations(group)
        for _ in range(2):
            replace(group, rank)
            run_operations(group)


@pytest.mark.parametrize("late", [0, 1])
def test_operations_while_a_worker_does_not_know_a_new_process(late: int) -> None:
    with cluster(3, dynamic=True) as group:
        run_operations(group)
        make_late(group[late])
        replace(group, 2)
        run_operations(group)


def test_the_leader_takes_the_value_of_a_new_process() -> None:
    """Also if the leader and another worker, which wait already, do not know it."""
    with cluster(3, dynamic=True) as group:
        run_operations(group)
        for worker in group.workers[:2]:
            make_late(worker)
        replace(group, 2)
        leader = gathering_of(group[0]._worker)

        def last() -> Any:
            eventually(lambda: leader.operations and leader.open_offers)
            return gather(group, 2, set(WHOLE))

        first = (partial(gather, group, i, set(WHOLE)) for i in range(2))
        assert run_concurrently(*first, last) == [WHOLE] * 3
        assert kept(group) == []


def test_a_worker_that_has_not_confirmed_offers_its_value_to_the_new_leader() -> None:
    with cluster(2, dynamic=True) as group:
        leader, follower = (gathering_of(worker._worker) for worker in group)
        ordinals = {name: follower._known((name,))[0] for name in ("w0", "w1")}
        follower._known = lambda names: tuple(ordinals[name] for name in names)

        def lead() -> Any:
            eventually(lambda: leader.open_offers)
            (first,) = leader.open_offers
            ordinals["w0"] += 1  # read in the log before the loss of the previous process was noticed
            follower.operations[0].proceed_signal.set()
            eventually(lambda: leader.open_offers and first not in leader.open_offers)
            return gather(group, 0, {"w0", "w1"})

        assert run_concurrently(partial(gather, group, 1, {"w0", "w1"}), lead) == [{"w0": 0, "w1": 1}] * 2


def test_the_loss_of_a_previous_process_ends_no_operation() -> None:
    """This worker has not read in the log that the worker came back."""
    ended: dict[str, int] = {"w1": incarnation_of(1, 0)}
    members = SimpleNamespace(
        lost_processes=lambda: ended, departed_names=lambda: ended.keys(), lost={1: "it left"}, name_of=lambda _: "w1"
    )
    worker: Any = SimpleNamespace(members=members)
    assert find_loss(worker, {"w0": 1, "w1": 2}, {"w0", "w1"}, {}) is None
    ended["w1"] = incarnation_of(2, 0)
    found = find_loss(worker, {"w0": 1, "w1": 2}, {"w0", "w1"}, {})
    assert isinstance(found, LeftWhileGathering)
    assert (found.name, found.why, found.incarnation) == ("w1", "it left", ended["w1"])


# ---- values that cannot be loaded


def refuse_to_load() -> None:
    raise ValueError("not here")


class Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_load, ()


def test_a_value_that_followers_cannot_take_ends_the_operation_of_all() -> None:
    def broadcast(rank: int) -> str:
        with pytest.raises(TelegradError) as caught:
            rpc.broadcast(Unloadable(), "w0", timeout=TIMEOUT)
        assert not isinstance(caught.value, TimeoutError)
        return str(caught.value)

    with cluster(2) as group:
        texts = group.on_each(broadcast)
        assert texts[0] == texts[1]
        start = "Followers ['w1'] timed out in _all_gather, or failed. The first exception is "
        assert texts[0].startswith(start)
        assert "not here" in texts[0]


# ---- workers outside of the set

PAIR = ["w1", "w2"]
OUTSIDER: dict[str, Callable[[], object]] = {
    "all_gather": lambda: rpc.all_gather("outside", PAIR, TIMEOUT),
    "barrier": lambda: rpc.barrier(PAIR, TIMEOUT),
    "broadcast": lambda: rpc.broadcast("outside", "w1", PAIR, TIMEOUT),
    "_all_gather": lambda: _all_gather("outside", set(PAIR), TIMEOUT),
    "_barrier": lambda: rpc.api._barrier(set(PAIR)),
}


@pytest.mark.parametrize("operation", OUTSIDER)
def test_a_worker_outside_of_the_set_spoils_nothing(operation: str) -> None:
    with cluster(3) as group:
        with (
            group[0],
            pytest.raises(ValueError, match="worker w0 called an operation of the workers w1, w2, of which it is none"),
        ):
            OUTSIDER[operation]()

        def member(rank: int) -> Callable[[], Any]:
            def use() -> Any:
                with group[rank]:
                    return rpc.all_gather(rank, PAIR, TIMEOUT), rpc.broadcast(rank, "w1", PAIR, TIMEOUT)

            return use

        assert run_concurrently(member(1), member(2)) == [({"w1": 1, "w2": 2}, 1)] * 2


def test_the_leader_refuses_workers_outside_of_the_set() -> None:
    leader, other = (Gathering(name, lambda names: (1,) * len(names)) for name in ("w1", "w0"))
    op, sequence_id = leader.begin(PAIR, "test"), str(other.begin(PAIR, "test").id)
    for names in ({"w1", "w2"}, {"w0", "w1", "w2"}):  # the request says either
        with pytest.raises(TelegradError, match="w0 is not expected by leader w1: the operation is of w1, w2"):
            leader.collect(sequence_id, "w0", "outside", names)
    with pytest.raises(TelegradError, match="w0 is not expected"):
        leader.collect("no id", "w0", "outside", {"w1"})
    assert leader.offers(op) == {}


def test_sets_of_workers_are_checked() -> None:
    with cluster(1):
        operations: list[Callable[[Any], Any]] = [rpc.barrier, lambda of: rpc.all_gather(1, of)]
        operations.append(lambda of: rpc.broadcast(1, "w0", of))
        for operation in operations:
            for one in ("w0", 0, rpc.get_worker_info()):
                with pytest.raises(TypeError, match=r"workers has to be a list or set of workers, not .*: pass \["):
                    operation(one)
            with pytest.raises(ValueError, match="workers is empty"):
                operation([])
            operation(name for name in ["w0", "w0"])

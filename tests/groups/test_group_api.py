"""Events of a group, waits for workers, services, and operations of live members."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from free_ports import free_port
from membership_helpers import members_of
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from telegrad import rpc
from telegrad.errors import NotInitialized, OwnerLost, RpcTimeout, TelegradError, WorkerLost
from telegrad.group.lease import lease_key, sealed_lease
from telegrad.group.records import Member, seat_of
from telegrad.protocols.leases import Watch, lease_value
from telegrad.protocols.membership import Joined, Lose
from telegrad.rpc import Options, Worker, services
from telegrad.rpc.groups import wait_until
from telegrad.testing import Cluster, cluster, eventually
from telegrad.worker.membership import service as membership_service

SOON = 0.2  # s; of waits that are meant to end
LONG = 30.0  # s


def subscribe_all(worker: Worker) -> "SimpleQueue[tuple[Any, ...]]":
    found: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    with worker:
        rpc.on_join(lambda info: found.put(("join", info.name, info.id)))
        rpc.on_leave(lambda info: found.put(("leave", info.name, info.id)))
        rpc.on_lost(lambda info, why: found.put(("lost", info.name, info.id, why)))
    return found


def lose(group: Cluster, observer: int, lost: int) -> None:
    """Write to the log of a group that a member is lost."""
    service = group[observer]._worker.membership
    core = group[lost]._worker
    assert service is not None
    service.append(
        Lose(core.info.id, core.incarnation, "it is silent"),
        lambda: service.log.view.has(core.info.id, core.incarnation),
    )


def is_out(worker: Worker) -> None:
    """Wait until a worker that the group has lost has closed itself."""
    eventually(worker._worker._close_done.is_set)


# ---- events


def test_events_in_order() -> None:
    with cluster(1, dynamic=True) as group:
        events = subscribe_all(group[0])
        for _ in range(2):
            worker = Worker("w1", store=group.store)
            worker.shutdown(timeout=LONG)
        assert [events.get(timeout=LONG) for _ in range(4)] == [("join", "w1", 1), ("leave", "w1", 1)] * 2


def test_goodbye_without_a_shutdown() -> None:
    """The others notice it before they observe the lease again."""
    with cluster(1, Options(member_lease=1000.0), dynamic=True) as group:
        events = subscribe_all(group[0])
        worker = Worker("w1", options=Options(member_lease=1000.0), store=group.store)
        worker.shutdown(graceful=False)
        assert [events.get(timeout=LONG) for _ in range(2)] == [("join", "w1", 1), ("leave", "w1", 1)]


def test_loss_of_a_member() -> None:
    """The others stop to use it, and it closes itself."""
    with cluster(3, dynamic=True) as group:
        events = subscribe_all(group[1])
        assert group[1].rpc_sync("w2", abs, (-1,)) == 1
        lose(group, 0, 2)
        assert events.get(timeout=LONG) == ("lost", "w2", 2, "it is silent")
        for observer in group.workers[:2]:
            with pytest.raises(WorkerLost, match="worker w2 is lost: it is silent"):
                observer.rpc_sync("w2", abs, (-1,))
        lost = group.workers.pop(2)
        is_out(lost)
        with pytest.raises(NotInitialized, match="worker w2 is out of its group: it is silent"):
            lost.rpc_sync("w0", abs, (-1,))
        group.workers.append(Worker("w2", store=group.store))
        assert events.get(timeout=LONG) == ("join", "w2", 2)
        assert group[0].rpc_sync("w2", abs, (-1,)) == 1


def test_functions_for_events_may_call_and_fail(caplog: pytest.LogCaptureFixture) -> None:
    answers: SimpleQueue[int] = SimpleQueue()

    def fail(_: rpc.WorkerInfo) -> None:
        raise KeyError("as it is")

    with cluster(1, dynamic=True) as group:
        first = rpc.on_join(fail)
        rpc.on_join(lambda info: answers.put(rpc.rpc_sync(info, abs, (-5,))))
        group.workers.append(Worker("w1", store=group.store))
        assert answers.get(timeout=LONG) == 5
        assert "a function for events of the group raised an exception" in caplog.text
        caplog.clear()
        first.remove()
        first.remove()
        group.workers.append(Worker("w2", store=group.store))
        assert answers.get(timeout=LONG) == 5
        assert not caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_function_for_events_that_exits(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Later functions and events are called all the same."""
    names: SimpleQueue[str] = SimpleQueue()

    def leave(_: rpc.WorkerInfo) -> None:
        raise error

    with cluster(1, dynamic=True) as group:
        rpc.on_join(leave)
        rpc.on_join(lambda info: names.put(info.name))
        for name in ("w1", "w2"):
            group.workers.append(Worker(name, store=group.store))
            assert names.get(timeout=LONG) == name
    assert caplog.text.count("a function for events of the group raised an exception") == 2
    assert "internal error" not in caplog.text


def test_events_outside_of_a_group() -> None:
    for subscribe in (rpc.on_join, rpc.on_leave, rpc.on_lost):
        with pytest.raises(NotInitialized):
            subscribe(print)


# ---- waits for workers


def test_wait_for_worker() -> None:
    with cluster(1, dynamic=True) as group:
        found: list[rpc.WorkerInfo] = []

        def wait() -> None:
            with group[0]:
                found.append(rpc.wait_for_worker("w1", timeout=LONG))

        waiting = threading.Thread(target=wait)
        waiting.start()
        group.workers.append(Worker("w1", store=group.store))
        waiting.join(LONG)
        assert found == [rpc.get_worker_info("w1")] == [rpc.wait_for_worker(1)]
        with pytest.raises(RpcTimeout, match=r"wait for worker w9.*Check that it is started"):
            rpc.wait_for_worker("w9", timeout=SOON)


def test_wait_for_a_worker_that_was_lost() -> None:
    with cluster(2, dynamic=True) as group:
        lose(group, 0, 1)
        with pytest.raises(RpcTimeout):
            rpc.wait_for_worker("w1", timeout=SOON)
        is_out(group[1])
        group.workers[1] = Worker("w1", store=group.store)
        assert rpc.wait_for_worker("w1", timeout=LONG).name == "w1"


def test_changes_of_the_group_do_not_shorten_a_wait() -> None:
    """A change looks for the value once more; only the clock ends the wait."""
    changed, calls = threading.Event(), 0

    def find() -> int | None:
        nonlocal calls
        calls += 1
        changed.set()
        return calls if calls == 1000 else None

    assert wait_until(find, changed, LONG, "wait for a test", "") == 1000


# ---- services


def test_services() -> None:
    with cluster(3) as group:
        with group[1]:
            rpc.register_service("scores", {"best": 1})
            rpc.register_service("of w2", rpc.remote("w2", list, ((1, 2),)))
        with group[0]:
            found = rpc.get_service("scores")
            assert (found.owner_name(), found.to_here()) == ("w1", {"best": 1})
            assert [rpc.get_service("of w2").rpc_sync().count(2), rpc.get_service("of w2").owner_name()] == [1, "w2"]
            with pytest.raises(TelegradError, match="w0 cannot register the service scores: worker w1 has it"):
                rpc.register_service("scores", {})
            with pytest.raises(TypeError, match="the name of a service is a string, but got 5"):
                rpc.register_service(5, {})  # type: ignore[arg-type]
            with pytest.raises(RpcTimeout, match="wait for the service other"):
                rpc.get_service("other", timeout=SOON)
        with group[1]:
            assert rpc.get_service("scores").local_value() == {"best": 1}
            rpc.register_service("scores", {"best": 2})
        with group[2]:
            assert rpc.get_service("scores").to_here() == {"best": 2}
        del found


def test_wait_for_a_service() -> None:
    with cluster(2, dynamic=True) as group:
        found: list[Any] = []

        def wait() -> None:
            with group[0]:
                found.append(rpc.get_service("late", timeout=LONG).to_here())

        waiting = threading.Thread(target=wait)
        waiting.start()
        with group[1]:
            rpc.register_service("late", 5)
        waiting.join(LONG)
        assert found == [5]


def test_service_of_a_worker_that_is_gone() -> None:
    with cluster(2, dynamic=True) as group:
        with group[1]:
            rpc.register_service("ps", 5)
        held = rpc.get_service("ps")
        assert held.to_here() == 5
        lose(group, 0, 1)
        with pytest.raises(WorkerLost, match="w1 is lost: it had registered the service ps, which is gone with it"):
            rpc.get_service("ps", timeout=SOON)
        with pytest.raises(OwnerLost):
            held.to_here()
        is_out(group[1])
        group.workers[1] = Worker("w1", store=group.store)
        with pytest.raises(WorkerLost):
            rpc.get_service("ps", timeout=SOON)
        rpc.register_service("ps", 6)  # by another worker
        with group[1]:
            assert rpc.get_service("ps").to_here() == 6


# ---- operations of live members


@pytest.mark.parametrize("dynamic", [False, True])
def test_operations_of_live_members(dynamic: bool) -> None:
    with cluster(4, dynamic=dynamic) as group:
        assert group.on_each(lambda rank: rpc.all_gather(rank)) == [{f"w{i}": i for i in range(4)}] * 4
        assert group.on_each(lambda _: rpc.barrier()) == [None] * 4
        values = group.on_each(lambda rank: rpc.broadcast(torch.full((3,), float(rank)), "w2"))
        assert [value.tolist() for value in values] == [[2.0] * 3] * 4
        for turn in range(3):  # each call is one of its own
            assert group.on_each(lambda rank: rpc.broadcast(turn if rank == 0 else None, 0)) == [turn] * 4  # noqa: B023
        pair = [group[1].info, "w3"]
        two: list[Callable[[], object]] = []
        for rank in (1, 3):
            two.append(lambda rank=rank: on(group[rank], lambda: rpc.all_gather(rank, pair)))  # type: ignore[misc]
        assert run(two) == [{"w1": 1, "w3": 3}] * 2


def test_operations_without_a_lost_member() -> None:
    with cluster(3, dynamic=True) as group:
        lose(group, 0, 2)
        is_out(group[2])
        eventually(lambda: len(group[1].get_worker_infos()) == 2)
        group.workers.pop()
        assert group.on_each(lambda rank: rpc.all_gather(rank)) == [{"w0": 0, "w1": 1}] * 2
        assert group.on_each(lambda _: rpc.broadcast(7, "w0")) == [7] * 2


def test_operation_that_a_worker_does_not_join() -> None:
    with cluster(2) as group:
        with pytest.raises(TelegradError, match=r"\['w1'\] timed out"):
            rpc.all_gather(1, timeout=SOON)
        with group[1], pytest.raises(TelegradError, match=r"\['w0'\] timed out"):
            rpc.broadcast(None, "w0", timeout=SOON)


def on(worker: Worker, function: Callable[[], object]) -> object:
    with worker:
        return function()


def run(functions: list[Callable[[], object]]) -> list[object]:
    from telegrad.testing import run_all

    return run_all(functions)


# ---- glue between events of the engine, the log and the references


def test_new_incarnation_drops_what_the_old_one_held() -> None:
    with cluster(2) as group:
        owner, user = group[0]._worker, group[1]._worker
        with group[1]:
            held = rpc.remote("w0", dict)
            held.to_here()
        assert [sorted(leak.tokens) for leak in owner.references.leaks()] == [[1]]
        owner.add_member(user.member)  # the same incarnation changes nothing
        assert len(owner.references.leaks()) == 1
        owner.add_member(user.member._replace(incarnation=user.incarnation + (1 << 32)))
        eventually(lambda: owner.references.leaks() == [])  # the session with the older process has ended
        del held
        group.close()


def test_the_end_of_an_older_process_is_no_loss_of_the_newer() -> None:
    with cluster(2) as group:
        owner, user = group[0]._worker, group[1]._worker
        with group[1]:
            held = rpc.remote("w0", dict)
            held.to_here()
        owner.on_peer_lost(1, user.incarnation - (1 << 32), "late report", False)
        assert (owner.references.leaks(), owner.members.lost) == ([], {})
        del held


def test_references_work_again_after_a_reconnect() -> None:
    """New references work once two live workers are connected again."""
    with cluster(2) as group:
        first, second = group[0]._worker, group[1]._worker
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1
        for mine, other in ((first, second), (second, first)):
            mine.on_peer_lost(other.info.id, other.incarnation, "a reset", False)
        for mine, other in ((first, second), (second, first)):
            mine.on_peer_back(other.info.id)
        assert group[0].remote("w1", dict).to_here() == {}
        assert first.members.lost == {}


def test_lost_connection_alone_removes_no_member() -> None:
    """The member is alive, so it stays in the log, and calls connect again."""
    store = HashStore()
    with cluster(2, Options(member_lease=1.0), store=store, dynamic=True) as group:
        first, second = group[0]._worker, group[1]._worker
        first.on_peer_lost(1, second.incarnation, "no route", False)
        service = first.membership
        assert service is not None
        eventually(lambda: not service._suspects and service._checked)
        assert sorted(members_of(store)) == ["w0", "w1"]
        first.on_peer_back(1)
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1


def test_an_effect_that_fails_does_not_prevent_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(1, dynamic=True) as group:
        core = group[0]._worker
        assert core.membership is not None
        added: list[str] = []

        def add_member(member: Member) -> None:
            added.append(member.name)
            if member.name == "w1":
                raise ValueError("no room")

        monkeypatch.setattr(core, "add_member", add_member)
        core.membership._apply([Joined(seat_of(core.member._replace(id=i, name=f"w{i}"))) for i in (1, 2)])
        assert added == ["w1", "w2"]
        assert "internal error in the membership of w0" in caplog.text


def test_service_of_a_worker_that_loses_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value remains that it could not register."""
    with cluster(2, dynamic=True) as group:
        with group[1]:
            rpc.register_service("scores", 1)
        with group[0]:
            service = group[0]._worker.membership
            assert service is not None
            monkeypatch.setattr(service.log.store, "get", lambda key: None)
            seen: list[object] = []

            def compare_set(*_: object) -> str:
                seen.append(services._services(group[0]._worker)["scores"].to_here())
                monkeypatch.undo()
                return "another"

            monkeypatch.setattr(service.log.store, "compare_set", compare_set)
            with pytest.raises(TelegradError, match="worker w1 has it, which is alive"):
                rpc.register_service("scores", 2)
            assert seen == [2]
            assert services._services(group[0]._worker) == {}
            assert rpc.get_service("scores").to_here() == 1


# ---- leases

SHORT = Options(member_lease=0.8)


def test_live_process_is_no_loss_although_its_lease_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may hold the GIL for long; the kernel reports that it runs."""
    store = HashStore()
    with cluster(2, SHORT, store=store, dynamic=True) as group:
        observer, late = (worker._worker.membership for worker in group)
        assert observer is not None
        assert late is not None
        monkeypatch.setattr(late._lease, "renew", lambda: True)

        def watch() -> Watch | None:
            return next(iter(observer._watches.values()), None)

        eventually(lambda: (seen := watch()) is not None and seen.has_expired(seen._observed), timeout=LONG)
        expired = watch()
        assert expired is not None
        observed = expired._observed
        eventually(lambda: expired._observed > observed, timeout=LONG)  # the observer has judged it
        assert sorted(members_of(store)) == ["w0", "w1"]
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1


def test_members_with_other_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that renews its lease less often than the observer expects remains."""
    monkeypatch.setattr(membership_service, "fate_of", lambda *_, **__: "unknown")
    store = HashStore()
    workers = [Worker(f"w{i}", options=Options(member_lease=0.4 + 100 * i), store=store) for i in range(2)]
    observer = workers[0]._worker.membership
    assert observer is not None
    eventually(lambda: observer.lease_ages().get(1, 0) > 1, timeout=LONG)  # longer than the observer's own lease
    assert sorted(members_of(workers[0]._worker.store)) == ["w0", "w1"]
    for worker in workers:
        worker.shutdown(timeout=LONG)


def test_lease_of_another_process_ends_the_worker() -> None:
    with cluster(2, SHORT, dynamic=True) as group:
        service = group[1]._worker.membership
        assert service is not None
        newer = lease_value(group[1]._worker.incarnation + 1, "another", 0)
        service.log.store.set(lease_key(1), sealed_lease(1, newer, group[1]._worker.group))
        is_out(group.workers.pop(1))
        eventually(lambda: "w1" not in [info.name for info in group[0].get_worker_infos()], timeout=LONG)


def test_worker_goes_on_without_the_store(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread ends when the host of the store is gone; calls and the shutdown work."""
    caplog.set_level("INFO", "telegrad")
    port = free_port()
    host = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    workers = [Worker(f"w{i}", options=SHORT, store=store) for i, store in enumerate(stores)]
    del host
    eventually(lambda: caplog.text.count("goes on without the store of its group") == 2, timeout=LONG)
    assert workers[0].rpc_sync("w1", abs, (-1,)) == 1
    for worker in workers:
        worker.shutdown(timeout=LONG)

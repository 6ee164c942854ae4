"""Several groups in one process, consecutive and concurrent."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from telegrad import rpc
from telegrad.errors import NotInitialized
from telegrad.testing import ResourceSnapshot, cluster, run_all

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]


def me(*_: Any) -> str:
    return rpc.get_worker_info().name


async def me_later() -> str:
    await asyncio.sleep(0)
    return rpc.get_worker_info().name


def test_two_concurrent_groups() -> None:
    with cluster(2, names="a{}") as a, cluster(2, names="b{}") as b:
        assert rpc.get_worker_info().name == "b0"  # the innermost
        with a[0]:
            assert me() == "a0"
            assert rpc.rpc_sync("a1", me) == "a1"
            assert rpc.rpc_async("a1", me_later).wait() == "a1"
            with pytest.raises(RuntimeError, match="could not find destination name b1"):
                rpc.rpc_sync("b1", me)
            with b[1]:
                assert rpc.rpc_sync("b0", me) == "b0"
            assert rpc.rpc_sync("a1", rpc.rpc_sync, ("a0", me)) == "a0"  # handlers are in their own group
        assert rpc.rpc_sync("b1", rpc.rpc_sync, ("b0", me)) == "b0"
        assert a[0].rpc_sync("a1", me) == "a1"
        assert b[0].remote("b1", me).to_here() == "b1"
        assert [w.name for w in a[0].get_worker_infos()] == ["a0", "a1"]


def crosses(to: str) -> str:
    with bridge[0]:
        return rpc.rpc_sync(to, me)


bridge: list[Any] = []


def test_a_handler_of_one_group_calls_in_another() -> None:
    with cluster(2, names="a{}"), cluster(2, names="b{}", current=None) as b:
        bridge[:] = [b[0]]
        assert rpc.rpc_sync("a1", crosses, ("b1",)) == "b1"
        assert rpc.rpc_sync("a1", me) == "a1"
        bridge.clear()


def test_callbacks_run_in_the_group_of_their_call() -> None:
    with cluster(2, names="a{}") as a, cluster(2, names="b{}"):
        future = a[0].rpc_async("a1", me)
        assert future.then(lambda done: (done.value(), me())).wait() in (("a1", "a0"), ("a1", "b0"))


def test_threads_and_contexts_have_their_own_current_worker() -> None:
    with cluster(2) as group:
        seen: list[Any] = []

        def other() -> None:
            try:
                rpc.get_worker_info()
            except NotInitialized as e:
                seen.append(e)
            with group[1]:
                seen.append(me())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert isinstance(seen[0], NotInitialized)
        assert seen[1] == "w1"
        assert me() == "w0"


def test_a_group_is_formed_repeatedly() -> None:
    before = ResourceSnapshot.now()
    for _ in range(5):
        with cluster(2):
            assert rpc.rpc_sync("w1", torch.add, (torch.ones(1), 1)).item() == 2
    before.assert_not_grown()


def join(rank: int, store: Any, calls: Any = None) -> rpc.Worker:
    return rpc.Worker(f"w{rank}", rank, 2, store=store)


def test_a_closed_worker() -> None:
    store = HashStore()
    workers = run_all([lambda rank=rank: join(rank, store) for rank in range(2)])  # type: ignore[misc]
    first, _ = workers
    rref = first.remote("w1", me)
    assert rref.to_here() == "w1"
    run_all([worker.shutdown for worker in workers])
    for use in (
        lambda: first.rpc_sync("w1", me),
        lambda: first.rpc_async("w1", me),
        lambda: first.remote("w1", me),
        lambda: first.rref(1),
    ):
        with pytest.raises(RuntimeError, match=r"has shut down|Current RPC agent is not set"):
            use()
    for use in (rref.to_here, lambda: rref.rpc_sync().upper()):
        with pytest.raises(RuntimeError, match="after deletion"):
            use()
    assert "given up at shutdown" in repr(rref)
    # On the same store: the next group has another prefix, as `init_rpc` gives it.
    again = PrefixStore("again", store)
    workers = run_all([lambda rank=rank: join(rank, again) for rank in range(2)])  # type: ignore[misc]
    assert workers[0].rpc_sync("w1", me) == "w1"
    run_all([worker.shutdown for worker in workers])


def test_shutdown_twice_and_by_several_threads() -> None:
    with cluster(2, graceful=False) as group:
        run_all([lambda worker=worker: worker.shutdown(graceful=False) for worker in group for _ in range(3)])  # type: ignore[misc]


def test_thread_pools_of_workers_are_independent() -> None:
    with cluster(2, rpc.Options(num_worker_threads=1), names="a{}"), cluster(2, names="b{}"):
        assert rpc.rpc_sync("b1", me) == "b1"


def test_outside_of_any_group() -> None:
    for use in (
        lambda: rpc.rpc_sync("w1", me),
        lambda: rpc.rpc_async("w1", me),
        lambda: rpc.remote("w1", me),
        rpc.get_worker_info,
        rpc.shutdown,
    ):
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            use()
    for use in (lambda: rpc.RRef(1), rpc.get_rpc_timeout):
        with pytest.raises(RuntimeError, match="Current RPC agent is not set"):
            use()


# ---- the process's own worker


def init_alone(name: str = "alone", tmp: str = "") -> None:
    rpc.init_rpc(name, rank=0, world_size=1, store=HashStore())


def test_init_call_shutdown_and_again() -> None:
    before = ResourceSnapshot.now()
    for number in range(3):
        init_alone(f"alone{number}")
        assert rpc.rpc_sync(f"alone{number}", me) == f"alone{number}"
        with pytest.raises(RuntimeError, match="RPC is already initialized"):
            init_alone()
        rpc.shutdown()
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            rpc.shutdown()
    before.assert_not_grown()


def test_the_default_worker_coexists_with_others() -> None:
    init_alone()
    try:
        with cluster(2, current=None) as group:
            assert me() == "alone"
            with group[1]:
                assert rpc.rpc_sync("w0", me) == "w0"
            assert me() == "alone"
            assert group[0].rpc_sync("w1", me) == "w1"
        assert run_all([me] * 3) == ["alone"] * 3  # in every thread
    finally:
        rpc.shutdown()


# ---- dynamic groups


def test_a_dynamic_group() -> None:
    with cluster(3, dynamic=True) as group:
        assert rpc.rpc_sync("w2", me) == "w2"
        assert group[2].rpc_sync("w0", me) == "w0"
        newcomer = rpc.Worker("late", store=group.store)
        assert newcomer.info.id == 3
        assert rpc.rpc_sync("late", me) == "late"
        newcomer.shutdown()
        with pytest.raises(RuntimeError, match="worker late is lost: it left the group"):
            rpc.rpc_sync("late", me)
        again = rpc.Worker("late", store=group.store)
        assert rpc.rpc_sync("late", me) == "late"
        again.shutdown()
        assert len(group[0].get_worker_infos()) == 3

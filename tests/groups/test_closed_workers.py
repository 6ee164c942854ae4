"""Resources of closed workers, and errors of their uses."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, RRefDeleted
from telegrad.options import Options
from telegrad.protocols.rref import RRefId
from telegrad.testing import Cluster, Gate, Local, ResourceSnapshot, assert_quiescent, cluster, eventually, run_all
from telegrad.worker import worker as worker_module
from telegrad.worker.closed import ClosedEngine

TIMEOUT = 20.0  # s
LARGE = 1 << 18  # elements; in memory of the pool, not of malloc


def timer_threads() -> set[str]:
    """Return the numbers of the native threads of engines.

    One that has been joined may be there a little longer.
    """
    return {task.parent.name for task in Path("/proc/self/task").glob("*/comm") if _name_of(task) == "telegrad-time\n"}


def _name_of(task: Path) -> str:
    try:
        return task.read_text()
    except OSError:  # the thread has just ended
        return ""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Check for leaks after each test."""
    with cluster(2):
        rpc.rpc_sync("w1", torch.ones, (LARGE,))  # creates the singletons of a process
    gc.collect()
    before, engines = ResourceSnapshot.now(), timer_threads()
    yield
    before.assert_not_grown()
    eventually(lambda: timer_threads() <= engines)


def make(value: float) -> torch.Tensor:
    return torch.full((LARGE,), value)


async def on_the_loop(value: float) -> torch.Tensor:
    return make(value)


def fail() -> None:
    raise KeyError("on purpose")


class Kept:
    """Objects of a group that a program may keep, one of each kind."""

    def __init__(self, group: Cluster) -> None:
        w0, w1 = group
        self.workers = list(group)
        self.cores = [worker._worker for worker in group]
        self.agent = rpc.api._get_current_rpc_agent()
        self.owned = w0.rref("mine")
        self.used = w0.remote("w1", make, (3.0,))
        self.used.to_here()
        self.proxy = self.used.rpc_sync()
        self.done = w0.rpc_async("w1", make, (2.0,))
        self.done.wait()
        self.received = w0.rpc_sync("w1", make, (1.0,))
        self.from_the_loop = w1.rpc_sync("w0", on_the_loop, (4.0,))
        self.seen: list[Any] = []
        w0.rpc_sync("w1", self._see, (Local(self),))
        with pytest.raises(KeyError) as caught:
            w0.rpc_sync("w1", fail)
        self.failure = caught.value

    @staticmethod
    def _see(kept: Local["Kept"]) -> None:
        """Keep an exception with the frames of the pool thread; runs on w1."""
        try:
            fail()
        except KeyError as e:
            kept.value.seen.append((e, inspect.currentframe()))


def assert_native_is_released(kept: Kept) -> None:
    for core in kept.cores:
        assert isinstance(core.engine, ClosedEngine)
        assert core.engine is core.server is core.calls.engine is core.calls.client is core.handlers.engine
        assert core.engine.stats()["connections"] == 0


# ---- kept objects


@pytest.mark.parametrize("graceful", [True, False])
def test_kept_objects_keep_no_resources(graceful: bool) -> None:
    before, engines = ResourceSnapshot.now(), timer_threads()
    with cluster(2, graceful=graceful, check=False) as group:
        assert len(timer_threads() - engines) == 2
        kept = Kept(group)
    before.assert_not_grown()
    eventually(lambda: timer_threads() <= engines)
    assert_native_is_released(kept)
    assert not any(core.pool.threads() for core in kept.cores)


def test_it_needs_no_cycle_collector() -> None:
    gc.disable()
    try:
        before, engines = len(ResourceSnapshot.now().fds), timer_threads()
        with cluster(2, check=False) as group:
            kept = Kept(group)
        eventually(lambda: timer_threads() <= engines)
        assert len(ResourceSnapshot.now().fds) == before
    finally:
        gc.enable()
    assert kept.received[0] == 1


def test_received_tensors_outlive_their_worker() -> None:
    with cluster(2, Options(transports=("unix",))) as group:
        core = group[0]._worker
        received = group[0].rpc_sync("w1", make, (5.0,))
        view = received[LARGE // 2 :]
        group[0].rpc_sync("w1", make, (6.0,))  # its memory is kept for the next tensor
        eventually(lambda: core.engine.stats()["cached_bytes"] > 0)
    stats = core.engine.stats()
    assert stats["live_blocks"] == 1
    assert stats["cached_bytes"] == 0, "unused memory is released with the engine"
    assert bool((received == 5).all())
    received += 1
    del received
    assert bool((view == 6).all())
    del view
    stats = core.engine.stats()
    assert stats["live_blocks"] == stats["cached_blocks"] == 0
    assert stats["pool_misses"] > 0
    assert_quiescent(core)


class DeferredValue:
    """Value that `test_parked_requests_are_released` creates on w1."""

    def __init__(self, gate: Gate) -> None:
        gate.enter()

    def take(self, tensor: torch.Tensor) -> None:
        raise AssertionError("the worker was closed before")


def test_parked_requests_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a value that does not exist yet holds the request's tensors."""
    gate = Gate()
    with cluster(2, graceful=False, check=False) as group:
        monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
        core = group[1]._worker
        rref = group[0].remote("w1", DeferredValue, (gate,))
        gate.wait_for()
        asked = group[0].rpc_async("w1", abs, (-1,))
        waits = rref.rpc_async().take(make(1.0))
        asked.wait()
        eventually(lambda: core.engine.stats()["live_blocks"] == 1)
        group[1].shutdown(graceful=False)
        assert core.engine.stats()["live_blocks"] == 0
        with pytest.raises(RuntimeError):
            waits.wait()
        gate.open()


# ---- uses


@pytest.fixture(scope="module")
def closed() -> Kept:
    with cluster(2) as group:
        return Kept(group)


@pytest.mark.parametrize(
    "use",
    [
        lambda kept: kept.workers[0].rpc_sync("w1", abs, (-1,)),
        lambda kept: kept.workers[0].rpc_async("w1", abs, (-1,)),
        lambda kept: kept.workers[0].remote("w1", abs, (-1,)),
        lambda kept: kept.workers[0].rref(1),
        lambda kept: kept.cores[0].rpc_sync("w1", abs, (-1,)),
        lambda kept: kept.cores[0].rpc_async(1, abs, (-1,)),
        lambda kept: kept.cores[0].start_internal(1, abs, (-1,), 5),
        lambda kept: kept.cores[0].calls.client.call(1, abs, (-1,), {}, 0),
        lambda kept: kept.cores[0].calls.client.start(1, abs, (-1,), {}, 0),
        lambda kept: kept.cores[0].add_member(kept.cores[1].member),
        lambda kept: kept.owned.to_here(),
        lambda kept: kept.owned.local_value(),
        lambda kept: kept.used.to_here(),
        lambda kept: kept.used.rpc_sync().sum(),
        lambda kept: kept.used.rpc_async().sum(),
        lambda kept: kept.used.remote().sum(),
        lambda kept: kept.used._get_type(),
        lambda kept: kept.proxy.sum(),
        lambda kept: kept.used._start(None, 0),
    ],
)
def test_uses_have_a_known_end(closed: Kept, use: Callable[[Kept], Any]) -> None:
    with pytest.raises((NotInitialized, RRefDeleted)) as caught:
        use(closed)
    said = str(caught.value)
    assert "RPC" in said or "rref" in said.lower() or "has been deleted" in said


def test_completed_results_are_kept(closed: Kept) -> None:
    assert bool((closed.done.wait() == 2).all())
    assert bool((closed.received == 1).all())
    assert bool((closed.from_the_loop == 4).all())
    assert closed.workers[0].info.name == "w0"
    assert [info.name for info in closed.workers[0].get_worker_infos()] == ["w0", "w1"]
    assert closed.used.owner_name() == "w1"
    assert closed.agent.get_debug_info()["agent.client_active_calls"] == "0"
    assert closed.cores[0].shutdown.drain(1.0)
    for worker in closed.workers:
        worker.shutdown()
        worker._worker.close()
        worker._worker.remove_member(0, "it may be said again")


def test_a_late_creation_leaks_nothing() -> None:
    with cluster(2, check=False) as group:
        core = group[0]._worker
    from telegrad.rref import RRef
    from telegrad.rref.create import create

    with pytest.raises(NotInitialized):
        create(RRef, core, 1, dict, (), {}, 0)
    assert core.references.pending_creations == 0


def test_references_may_be_deleted_later() -> None:
    with cluster(2) as group:
        core = group[0]._worker
        rrefs = [group[0].remote("w1", dict) for _ in range(10)]
        for rref in rrefs:
            rref.to_here()
        lone = rrefs[0].id
    rrefs.clear()
    del rref
    assert isinstance(lone, RRefId)
    assert not core.references.dropped
    core.references.release_handle(lone, 0)
    core.references.collect()
    assert not core.references.dropped


# ---- callers and handlers in progress


@pytest.mark.parametrize("how", ["sync", "wait", "await"])
def test_pending_callers_are_notified(how: str) -> None:
    gate = Gate()
    with cluster(2, graceful=False, check=False) as group:
        worker, core = group[0], group[0]._worker

        async def awaits() -> None:
            await worker.rpc_async("w1", gate.enter)

        ways: dict[str, Callable[[], Any]] = {
            "sync": lambda: worker.rpc_sync("w1", gate.enter),
            "wait": lambda: worker.rpc_async("w1", gate.enter).wait(),
            "await": lambda: asyncio.run(awaits()),
        }

        def close() -> None:
            gate.wait_for(3)
            core.close()
            gate.open()

        def call() -> str:
            with pytest.raises(NotInitialized) as caught:
                ways[how]()
            return str(caught.value)

        *said, _ = run_all([call, call, call, close])
        assert all("pending when this worker shut down" in text for text in said)
        assert isinstance(core.engine, ClosedEngine)


def test_abandoned_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler holds the engine as long as it runs, and its result is dropped."""
    gate = Gate()
    engines = timer_threads()
    with cluster(2, graceful=False, check=False) as group:
        monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
        core = group[1]._worker
        future = group[0].rpc_async("w1", gate.enter)
        gate.wait_for()
    with pytest.raises(NotInitialized):
        future.wait()
    assert isinstance(core.engine, ClosedEngine)
    gate.open()
    eventually(lambda: not core.pool.threads() and timer_threads() <= engines, TIMEOUT)


async def never_runs(ran: Local[list[int]]) -> None:
    ran.value.append(1)


def late_coroutine(gate: Gate, ran: Local[list[int]]) -> Any:
    gate.enter()
    return never_runs(ran)


def test_no_loop_starts_after_the_end(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    gate, ran = Gate(), Local[list[int]]([])
    with cluster(2, graceful=False, check=False) as group:
        monkeypatch.setattr(worker_module, "_JOIN_TIMEOUT", 0.0)
        core = group[1]._worker
        kept = group[0].rpc_async("w1", late_coroutine, (gate, ran))
        gate.wait_for()
    gate.open()
    eventually(lambda: not core.pool.threads(), TIMEOUT)
    core.timers.call_later(0.0, lambda: ran.value.append(2))
    ended = ("telegrad-w1-loop", "telegrad-w1-timers")
    eventually(lambda: not [t for t in threading.enumerate() if t.name in ended], TIMEOUT)
    assert ran.value == []
    with pytest.raises(NotInitialized):
        kept.wait()


def close_my_worker() -> None:
    worker_module.current.get().worker.close()


def test_handler_that_closes_its_worker() -> None:
    engines = timer_threads()
    with cluster(2, graceful=False, check=False) as group:
        core = group[1]._worker
        with pytest.raises(RuntimeError):
            group[0].rpc_sync("w1", close_my_worker)
        eventually(lambda: not core.pool.threads() and len(timer_threads() - engines) == 1, TIMEOUT)
        assert isinstance(core.engine, ClosedEngine)


def close_under_callers() -> None:
    """Call in a loop on several threads until the worker is closed."""
    with cluster(2, graceful=False, check=False) as group:
        worker, core = group[0], group[0]._worker
        under_way = threading.Semaphore(0)

        def sync() -> None:
            assert worker.rpc_sync("w1", abs, (-1,)) == 1

        def wait() -> None:
            assert worker.rpc_async("w1", abs, (-1,)).wait() == 1

        def refer() -> None:
            assert worker.remote("w1", int, (1,)).to_here() == 1

        def go_on(call: Callable[[], None]) -> None:
            try:
                while True:
                    call()
                    under_way.release()
            except (NotInitialized, RRefDeleted):
                pass

        def close() -> None:
            for _ in range(20):
                assert under_way.acquire(timeout=TIMEOUT)
            core.close()

        run_all([*(partial(go_on, call) for call in (sync, wait, refer)), close], TIMEOUT)
        eventually(lambda: not core.references.pending_creations)


def test_closing_while_others_call() -> None:
    """Calls end with their value or the known error, whenever the worker is closed."""
    for _ in range(20):
        close_under_callers()


def test_other_workers_of_the_process_continue() -> None:
    with cluster(2, current=None, check=False) as stays:
        with cluster(2, current=None, check=False) as goes:
            kept = goes[0].rref(1)
            assert goes[0].rpc_sync("w1", abs, (-1,)) == 1
        for worker in stays:
            assert worker.rpc_sync("w0", abs, (-2,)) == 2
            assert worker.rpc_sync("w1", abs, (-2,)) == 2
        with pytest.raises(RRefDeleted):
            kept.to_here()


# ---- the closed engine


def test_it_has_every_method_of_an_engine() -> None:
    with cluster(1) as group:
        core = group[0]._worker
        natives = [core.engine, core.server, core.calls.client]
        methods = {name for native in natives for name in dir(native) if callable(getattr(native, name))}
        methods = {name for name in methods if not name.startswith("_")}
        stats = core.engine.stats()
        copied = ClosedEngine(core.engine)
        natives.clear()
    assert {name for name in dir(ClosedEngine) if not name.startswith("_")} == methods | {"raise_closed"}
    assert ClosedEngine(None).stats() == dict.fromkeys(stats, 0)
    assert copied.stats().keys() == stats.keys()
    assert copied.stats()["sent_messages"] == stats["sent_messages"]


def test_methods_that_raise_and_methods_without_effect() -> None:
    ended = ClosedEngine(None)
    for refused in (ended.call, ended.start, ended.wait, ended.listen, ended.set_peer):
        with pytest.raises(NotInitialized, match="RPC has not been initialized"):
            refused(1, 2, 3)
    for ignored in (
        ended.acknowledge,
        ended.request_callback,
        ended.stop,
        ended.disconnect,
        ended.remove_peer,
        ended.next,
        ended.resume,
    ):
        assert ignored(1) is None
    assert ended.send(1) is ended.reply(1) is ended.is_open(1) is False

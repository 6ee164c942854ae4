"""The caller's grad mode, inference mode and autocast hold in the handler only."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.wire import Flag
from telegrad.worker.scope import Autocast, handler_state

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]

DEFAULT = (True, False, False, torch.bfloat16, True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[Cluster]:
    """With one pool thread, the next request sees the state that a handler left."""
    with cluster(2, rpc.Options(num_worker_threads=1)) as group:
        yield group


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


async def state_in_coroutine() -> list[Any]:
    seen = [state()]
    await asyncio.sleep(0)
    seen.append(state())
    return seen


@rpc.functions.async_execution
def state_in_future() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(state())
    return future


class Owned:
    def state(self) -> tuple[Any, ...]:
        return state()


MODES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "default": (contextlib.nullcontext, DEFAULT),
    "no_grad": (torch.no_grad, (False, False, False, torch.bfloat16, True)),
    "inference": (torch.inference_mode, (False, True, False, torch.bfloat16, True)),
    "autocast": (lambda: torch.autocast("cpu"), (True, False, True, torch.bfloat16, True)),
    "autocast to half": (lambda: torch.autocast("cpu", dtype=torch.float16), (True, False, True, torch.float16, True)),
    "autocast without cache": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        (True, False, True, torch.bfloat16, False),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_handler_has_the_callers_state(mode: str) -> None:
    enter, expected = MODES[mode]
    rref = rpc.remote("w1", Owned)
    with enter():
        assert rpc.rpc_sync("w1", state) == expected
        assert rpc.rpc_async("w1", state).wait() == expected
        assert rpc.remote("w1", state).to_here() == expected
        assert rref.rpc_sync().state() == expected
        assert rref.rpc_async().state().wait() == expected
        assert rref.remote().state().to_here() == expected
        assert rpc.rpc_sync("w1", state_in_future) == expected
        assert rpc.rpc_sync("w1", state_in_coroutine) == [expected] * 2
        assert rpc.rpc_sync("w0", state) == expected
        assert rpc.rpc_sync("w1", rpc.rpc_sync, ("w0", state)) == expected  # and in nested calls
        assert state() == expected
    assert rpc.rpc_sync("w1", state) == DEFAULT
    assert rpc.rpc_sync("w1", state_in_coroutine) == [DEFAULT] * 2
    assert state() == DEFAULT


def leave(what: str) -> None:
    """Handler that leaves torch's state changed."""
    if what == "no_grad":
        torch.set_grad_enabled(False)
    elif what == "inference":
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
    else:
        kept.append(torch.autocast("cpu", dtype=torch.float16, cache_enabled=False))
        kept[-1].__enter__()


kept: list[Any] = []  # forever: a guard that dies restores its state in the thread that frees it


def leave_and_fail(what: str) -> None:
    leave(what)
    raise ValueError(what)


async def leave_in_coroutine(what: str) -> None:
    leave(what)
    await asyncio.sleep(0)
    leave(what)


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
def test_state_changed_by_a_handler_is_restored(what: str) -> None:
    for enter, expected in MODES.values():
        with enter():
            rpc.rpc_sync("w1", leave, (what,))
            assert rpc.rpc_sync("w1", state) == expected
            with pytest.raises(ValueError, match=what):
                rpc.rpc_sync("w1", leave_and_fail, (what,))
            assert rpc.rpc_sync("w1", state) == expected
            rpc.rpc_sync("w1", leave_in_coroutine, (what,))
            assert rpc.rpc_sync("w1", state_in_coroutine) == [expected] * 2
        assert rpc.rpc_sync("w1", state) == DEFAULT
        assert rpc.rpc_sync("w1", state_in_coroutine) == [DEFAULT] * 2


async def modes_across_awaits(mode: str, gate: Gate) -> list[Any]:
    """Hold a mode while other coroutines run in the same thread."""
    seen = [state()]
    with MODES[mode][0]():
        seen.append(state())
        gate.entered.release()
        while not gate.is_open():
            await asyncio.sleep(0)
        seen.append(state())
    seen.append(state())
    return seen


@pytest.mark.parametrize("callers", MODES)
def test_coroutines_keep_the_modes_they_entered_and_no_others(callers: str) -> None:
    gate = Gate()
    with MODES[callers][0]():
        outside = state()
        futures = {mode: rpc.rpc_async("w1", modes_across_awaits, (mode, gate)) for mode in MODES}
    gate.wait_for(len(futures))
    assert rpc.rpc_sync("w1", state_in_coroutine) == [DEFAULT] * 2
    gate.open()
    for mode, future in futures.items():
        with MODES[callers][0](), MODES[mode][0]():
            inside = state()
        assert future.wait() == [outside, inside, inside, outside], mode
    assert rpc.rpc_sync("w1", state_in_coroutine) == [DEFAULT] * 2


async def states_of_tasks() -> list[Any]:
    async with asyncio.TaskGroup() as group:
        made = group.create_task(state_in_coroutine())
    gathered = await asyncio.gather(state_in_coroutine(), state_in_coroutine())
    waited = await asyncio.wait_for(state_in_coroutine(), 10)
    return [*made.result(), *gathered[0], *gathered[1], *waited]


@pytest.mark.parametrize("mode", MODES)
def test_tasks_of_coroutines_have_their_state(mode: str) -> None:
    with MODES[mode][0]():
        inside = state()
        assert set(rpc.rpc_sync("w1", states_of_tasks)) == {inside}
    assert set(rpc.rpc_sync("w1", states_of_tasks)) == {DEFAULT}


async def modes_of_overlapping_tasks(mode: str, gate: Gate) -> list[Any]:
    return await asyncio.gather(*[modes_across_awaits(mode, gate) for _ in range(2)])


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_overlapping_tasks_end_with_them(mode: str) -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", modes_of_overlapping_tasks, (mode, gate))
    gate.wait_for(2)
    assert set(rpc.rpc_sync("w1", states_of_tasks)) == {DEFAULT}
    gate.open()
    with MODES[mode][0]():
        inside = state()
    assert future.wait() == [[DEFAULT, inside, inside, DEFAULT]] * 2
    assert set(rpc.rpc_sync("w1", states_of_tasks)) == {DEFAULT}


def describe_task() -> str:
    return repr(asyncio.current_task())


async def named() -> str:
    return describe_task()


async def describes_its_task() -> str:
    return await asyncio.create_task(named())


def test_a_task_describes_its_coroutine() -> None:
    assert "named()" in rpc.rpc_sync("w1", describes_its_task)


@pytest.mark.parametrize("callers", [None, (("cpu", "bfloat16"), ("cache", "off"))])
@pytest.mark.parametrize("flags", [0, int(Flag.NO_GRAD), int(Flag.INFERENCE)])
@pytest.mark.parametrize("left", [False, True])
def test_autocast_of_the_thread_is_restored(callers: Autocast, flags: int, left: bool) -> None:
    """A caller's state is set while autocast is on."""
    with torch.autocast("cpu", dtype=torch.float16):
        before = state()
        with handler_state(flags, callers):
            assert state()[2:] == (True, torch.bfloat16, False) if callers else before[2:]
            if left:
                torch.set_autocast_enabled("cpu", False)
                torch.set_autocast_dtype("cpu", torch.bfloat16)
                torch.set_autocast_cache_enabled(False)
        assert state() == before
    assert state() == DEFAULT


def test_no_grad_records_no_graph_at_the_callee() -> None:
    x = torch.ones(2, requires_grad=True)
    assert rpc.rpc_sync("w1", has_graph, (x,))
    with torch.no_grad():
        assert not rpc.rpc_sync("w1", has_graph, (x,))
    with torch.inference_mode():
        assert not rpc.rpc_sync("w1", has_graph, (x,))
        assert rpc.rpc_sync("w1", makes_inference_tensors)
    assert not rpc.rpc_sync("w1", makes_inference_tensors)


def has_graph(x: torch.Tensor) -> bool:
    return (x * 2).requires_grad


def makes_inference_tensors() -> bool:
    return torch.ones(1).is_inference()


def test_autocast_computes_in_its_type_at_the_callee() -> None:
    x = torch.ones(2, 2)
    assert rpc.rpc_sync("w1", torch.mm, (x, x)).dtype == torch.float32
    with torch.autocast("cpu"):
        assert rpc.rpc_sync("w1", torch.mm, (x, x)).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert rpc.rpc_sync("w1", torch.mm, (x, x)).dtype == torch.float32


def test_callbacks_run_in_the_default_state() -> None:
    with torch.no_grad():
        chained = rpc.rpc_async("w1", state).then(lambda done: (done.value(), state()))
    assert chained.wait()[0] == MODES["no_grad"][1]


def fail_there() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
@pytest.mark.parametrize("function", [state, fail_there], ids=["value", "error"])
def test_state_changed_by_a_callback_is_restored(one_thread: Cluster, what: str, function: Any) -> None:
    """The thread of the callback also runs the next request, or another one starts.

    In the second case the state of all threads is checked.
    """
    states: list[Any] = []
    ran = threading.Event()

    def callback(_: Any) -> None:
        leave(what)
        ran.set()

    with one_thread[0]:
        for _ in range(20):
            ran.clear()
            gate = Gate()
            future = rpc.rpc_async("w1", Then(gate, function).enter)
            future.add_done_callback(callback)  # before it ends, so that it runs in the pool
            gate.open()
            assert ran.wait(10)
            future._mark_read()  # its failure is on purpose
            later = rpc.rpc_async("w0", state)
            eventually(later.done)  # this thread does not poll, so the pool's does
            states.append(later.value())
            assert future.done()
    assert set(states) == {DEFAULT}


@contextlib.contextmanager
def free_threads(count: int, caller: rpc.Worker, callee: rpc.Worker) -> Iterator[Callable[[], None]]:
    """Block all but `count` threads of the callee's pool, which starts no other.

    Yields a function that starts one.
    """
    pool, gate = callee._worker.pool, Gate()
    eventually(lambda: callee._worker.engine.stats()["running_handlers"] == 0)  # no thread is about to start another
    with pytest.MonkeyPatch.context() as patch:
        start = pool.start
        patch.setattr(pool, "start", lambda: None)
        others = len(pool.threads()) - count
        blocked = [caller.rpc_async(callee.info.name, gate.enter) for _ in range(others)]
        gate.wait_for(others)
        try:
            yield start
        finally:
            gate.open()
            for call in blocked:
                call.wait()


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
def test_a_request_behind_a_callback_runs_in_the_default_state(what: str) -> None:
    """The thread takes both from the queue without going to sleep in between."""
    replied = Gate()
    with cluster(2, rpc.Options(num_worker_threads=8)) as (w0, w1), free_threads(0, w1, w0) as start:
        future = w0.rpc_async("w1", replied.enter)
        future.add_done_callback(lambda _: leave(what))
        replied.wait_for()
        replied.open()
        request = w1.rpc_async("w0", state)

        def both_are_queued() -> bool:
            w0.rpc_sync("w1", len, ("",))  # this thread reads for the pool meanwhile
            stats: dict[str, int] = w0._worker.engine.stats()
            return stats["pending_calls"] == 0 and stats["queued_requests"] == 1

        eventually(both_are_queued)
        assert not future.done()
        start()
        assert request.wait() == DEFAULT
        assert future.done()


@rpc.functions.async_execution
def value_of(local: Local[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    return local.value


@pytest.mark.parametrize("mode", ["no_grad", "inference", "autocast"])
def test_a_waiting_request_leaves_its_state_out_of_its_thread(mode: str) -> None:
    """The thread runs the next request in the meantime."""
    enter, expected = MODES[mode]
    owned = Local[torch.futures.Future[Any]](torch.futures.Future())
    with cluster(2, rpc.Options(num_worker_threads=8)) as (w0, w1), free_threads(1, w0, w1):
        rref = w0.remote("w1", value_of, (owned,))
        with enter():
            waits = rref.rpc_async().state()
        assert w0.rpc_sync("w1", state) == DEFAULT
        assert not waits.done()
        owned.value.set_result(Owned())
        assert waits.wait() == expected
        assert w0.rpc_sync("w1", state) == DEFAULT
        del rref


class Then:
    def __init__(self, gate: Gate, function: Any) -> None:
        self.gate, self.function = gate, function

    def enter(self) -> Any:
        self.gate.enter()
        return self.function()


@rpc.functions.async_execution
def leave_and_return_future(what: str) -> torch.futures.Future[Any]:
    leave(what)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(None)
    return future


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
def test_state_changed_by_a_deferred_handler_is_restored(what: str) -> None:
    rpc.rpc_sync("w1", leave_and_return_future, (what,))
    assert rpc.rpc_sync("w1", state) == DEFAULT

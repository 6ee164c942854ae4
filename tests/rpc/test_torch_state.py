"""Grad mode, inference mode and autocast of the caller hold in the handler, and nowhere else."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.testing import Cluster, Gate, cluster, eventually

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("error")]

DEFAULT = (True, False, False, torch.bfloat16, True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[Cluster]:
    """With one thread for requests, whatever a handler leaves in its thread is met by the next one."""
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
    """A handler that does not tidy up."""
    if what == "no_grad":
        torch.set_grad_enabled(False)
    elif what == "inference":
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
    else:
        kept.append(torch.autocast("cpu", dtype=torch.float16, cache_enabled=False))
        kept[-1].__enter__()


kept: list[Any] = []  # for ever: a guard that dies puts back its state in whichever thread that happens


def leave_and_fail(what: str) -> None:
    leave(what)
    raise ValueError(what)


async def leave_in_coroutine(what: str) -> None:
    leave(what)
    await asyncio.sleep(0)
    leave(what)


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
def test_what_a_handler_leaves_switched_is_undone(what: str) -> None:
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
    """Holds a mode while others run on the same thread."""
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


def test_no_grad_means_no_graph_there() -> None:
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


def test_autocast_computes_in_its_type_there() -> None:
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
def test_what_a_callback_leaves_switched_is_undone(one_thread: Cluster, what: str, function: Any) -> None:
    """The thread that runs the callback also runs the request that follows it, or one thread more is started: then the
    state of all of them is looked at."""
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
            future._disregard()  # its failure is on purpose
            later = rpc.rpc_async("w0", state)
            eventually(later.done)  # this thread does not poll, so the pool's does
            states.append(later.value())
            assert future.done()
    assert set(states) == {DEFAULT}


class Then:
    def __init__(self, gate: Gate, function: Any) -> None:
        self.gate, self.function = gate, function

    def enter(self) -> Any:
        self.gate.enter()
        return self.function()


@rpc.functions.async_execution
def leave_and_answer_later(what: str) -> torch.futures.Future[Any]:
    leave(what)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(None)
    return future


@pytest.mark.parametrize("what", ["no_grad", "inference", "autocast"])
def test_what_a_handler_leaves_that_answers_later_is_undone(what: str) -> None:
    rpc.rpc_sync("w1", leave_and_answer_later, (what,))
    assert rpc.rpc_sync("w1", state) == DEFAULT

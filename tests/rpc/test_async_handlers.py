"""``async def`` handlers run concurrently on the worker's event loop."""

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from cancellation_helpers import Log

from telegrad import autograd, rpc
from telegrad.errors import Cancelled, RpcTimeout
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker import current

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]


def echo(x: Any) -> Any:
    return x


async def double(x: Any) -> Any:
    await asyncio.sleep(0)
    return x * 2


async def thread_and_worker() -> tuple[str, str]:
    await asyncio.sleep(0)
    return threading.current_thread().name, rpc.get_worker_info().name


async def fails() -> None:
    await asyncio.sleep(0)
    raise KeyError("in a coroutine")


async def asks(to: str, x: Any) -> Any:
    first = await rpc.rpc_async(to, double, (x,))
    rest = await asyncio.gather(*(rpc.rpc_async(to, echo, (i,)) for i in range(3)))
    return first, rest


async def with_tensors(x: torch.Tensor) -> torch.Tensor:
    x += 1
    await asyncio.sleep(0)
    return x


class Owned:
    def __init__(self) -> None:
        self.count = 0

    async def add(self, n: int) -> int:
        await asyncio.sleep(0)
        self.count += n
        return self.count

    @staticmethod
    async def static(x: int) -> int:
        return x + 1

    @classmethod
    async def named(cls) -> str:
        return cls.__name__


class Batcher:
    """Serves requests in a task that the first one starts."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[asyncio.Future[float]] | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self) -> float:
        """Return the seconds that a call made by the task has left."""
        if self._requests is None:
            self._requests = asyncio.Queue()
            self._task = asyncio.create_task(self._serve(self._requests))
        reply: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(reply)
        return await reply

    async def _serve(self, requests: "asyncio.Queue[asyncio.Future[float]]") -> None:
        while True:
            reply = await requests.get()
            reply.set_result(await rpc.call("w0", time_left))

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()


def time_left() -> float:
    scope = current.get()
    assert scope is not None
    return (scope.deadline - time.monotonic_ns()) / 1e9


def test_a_task_leaves_the_deadline_of_the_handler_that_has_made_it() -> None:
    batcher = rpc.remote("w1", Batcher)
    during = batcher.rpc_sync(timeout=30).ask()
    after = batcher.rpc_sync(timeout=30).ask()
    batcher.rpc_sync().stop()
    assert during <= 30 < after  # the default is 60 s


def test_all_kinds_of_calls() -> None:
    assert rpc.rpc_sync("w1", double, (2,)) == 4
    assert rpc.rpc_async("w1", double, (2,)).wait() == 4
    assert rpc.remote("w1", double, (2,)).to_here() == 4
    assert rpc.rpc_sync("w0", double, (2,)) == 4
    assert rpc.rpc_sync("w1", Owned.static, (2,)) == 3
    assert rpc.rpc_sync("w1", Owned.named) == "Owned"
    owned = rpc.remote("w1", Owned)
    assert owned.rpc_sync().add(2) == 2
    assert owned.rpc_async().add(2).wait() == 4
    assert owned.remote().add(2).to_here() == 6
    assert torch.equal(rpc.rpc_sync("w1", with_tensors, (torch.ones(3),)), torch.full((3,), 2.0))

    async def local(x: int) -> int:
        return x + 1

    assert rpc.rpc_sync("w1", local, (2,)) == 3


def test_handlers_run_on_the_workers_loop() -> None:
    assert rpc.rpc_sync("w1", thread_and_worker) == ("telegrad-w1-loop", "w1")
    assert rpc.rpc_sync("w0", thread_and_worker) == ("telegrad-w0-loop", "w0")


def test_errors_are_those_of_functions() -> None:
    for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait(), lambda *a: rpc.remote(*a).to_here()):
        with pytest.raises(KeyError, match="in a coroutine") as caught:
            call("w1", fails)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.worker == "w1"
    with pytest.raises(TypeError, match="positional argument"):
        rpc.rpc_sync("w1", double)


def test_handlers_await_nested_calls() -> None:
    assert rpc.rpc_sync("w1", asks, ("w0", 3)) == (6, [0, 1, 2])
    assert rpc.rpc_sync("w1", asks, ("w1", 3)) == (6, [0, 1, 2])
    assert rpc.rpc_sync("w1", asks, ("w0", torch.ones(1)))[0] == 2


async def meets(barrier: "Meeting", n: int) -> int:
    await barrier.meet(n)
    return n


class Meeting:
    """Barrier for coroutines of one loop."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def meet(self, n: int) -> None:
        self.gate.entered.release()
        while not self.gate.is_open():
            await asyncio.sleep(0.001)


def test_hundreds_at_once_on_one_thread() -> None:
    with cluster(2, rpc.Options(num_worker_threads=1)):
        gate = Gate()
        futures = [rpc.rpc_async("w1", meets, (Meeting(gate), i)) for i in range(300)]
        gate.wait_for(300)  # all of them have begun
        assert rpc.rpc_sync("w1", echo, (1,)) == 1  # and the only thread is free
        gate.open()
        assert torch.futures.wait_all(futures) == list(range(300))


async def deadline_of_nested_call(gate: Gate) -> None:
    await rpc.rpc_async("w0", gate.enter)


def test_nested_calls_inherit_the_callers_deadline() -> None:
    gate = Gate()
    nested = rpc.rpc_async("w1", records_timeout, (gate,), timeout=0.1)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        nested.wait()
    assert ended.wait(10)  # the nested call has ended too, although its own timeout is a minute
    gate.open()


ended = threading.Event()


async def records_timeout(gate: Gate) -> None:
    try:
        await deadline_of_nested_call(gate)
    except (RuntimeError, asyncio.CancelledError):  # the deadline of the nested call, or the request's own
        ended.set()
        raise


async def exits(kind: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise kind("from a coroutine")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_exits_end_neither_loop_nor_worker(kind: type[BaseException]) -> None:
    with pytest.raises(RuntimeError, match=kind.__name__):
        rpc.rpc_sync("w1", exits, (kind,), timeout=10)
    assert rpc.rpc_sync("w1", double, (2,)) == 4


@rpc.functions.async_execution
async def both(x: int) -> int:
    return x + 1


@rpc.functions.async_execution
async def both_with_future(x: int) -> Any:
    return rpc.rpc_async("w0", echo, (x,))


def test_async_execution_of_a_coroutine_function() -> None:
    assert rpc.rpc_sync("w1", both, (1,)) == 2
    with pytest.raises(RuntimeError, match="Future"):
        rpc.rpc_sync("w1", both_with_future, (1,))


async def waits_forever(gate: Gate) -> None:
    gate.entered.release()
    await asyncio.Event().wait()


def test_shutdown_cancels_waiting_handlers(two: Cluster) -> None:
    with cluster(2, graceful=False, check=True) as group:
        gate = Gate()
        future = group[0].rpc_async("w1", waits_forever, (gate,))
        gate.wait_for()
        group[1].shutdown(graceful=False)
        group.workers.pop()
        with pytest.raises(RuntimeError, match=r"stopped|lost"):
            future.wait()


def test_a_slow_handler_does_not_delay_others() -> None:
    gate = Gate()
    slow = rpc.rpc_async("w1", waits_at, (gate,))
    gate.wait_for()
    assert rpc.rpc_sync("w1", double, (4,)) == 8
    gate.open()
    assert slow.wait() == "went on"


async def waits_at(gate: Gate) -> str:
    gate.entered.release()
    while not gate.is_open():
        await asyncio.sleep(0.001)
    return "went on"


# ---- coroutines that block


async def blocks(way: str) -> int:
    if way == "rpc_sync":
        return int(rpc.rpc_sync("w0", echo, (1,)))
    if way == "to_here":
        return int(rpc.remote("w0", echo, (1,)).to_here())
    if way == "method":
        return int(rpc.remote("w0", Owned).rpc_sync().static(1))
    if way == "get_service":
        rpc.get_service("no such service", timeout=5)
    if way == "wait_for_worker":
        rpc.wait_for_worker("w9", timeout=5)
    if way == "backward":
        with autograd.context() as context_id:
            loss = await rpc.rpc_async("w0", torch.sum, (torch.ones(2, requires_grad=True),))
            autograd.backward(context_id, [loss])
    if way == "backward in plain mode":
        with autograd.plain():
            loss = await rpc.rpc_async("w0", torch.sum, (torch.ones(2, requires_grad=True),))
        loss.backward()
    gate = Gate()
    futures = [rpc.rpc_async("w0", passes, (gate, i)) for i in range(2)]
    gate.wait_for(2)
    try:
        if way == "wait":
            return int(futures[1].wait())
        return sum(rpc.wait_all(futures))
    finally:
        gate.open()


def passes(gate: Gate, x: int) -> int:
    gate.enter()
    return x


WAYS = {
    "rpc_sync": "await rpc_async",
    "to_here": "await the RRef",
    "method": "await rpc_async",
    "wait": "await future",
    "wait_all": "await asyncio.gather",
    "get_service": "await asyncio.to_thread",
    "wait_for_worker": "await asyncio.to_thread",
    "backward": "await asyncio.to_thread",
    "backward in plain mode": "await asyncio.to_thread",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_blocking_call_in_a_coroutine_is_an_error(way: str) -> None:
    with pytest.raises(RuntimeError, match=rf"would block the event loop of worker 'w1'; use .*{WAYS[way]}"):
        rpc.rpc_sync("w1", blocks, (way,))
    assert rpc.rpc_sync("w1", double, (2,)) == 4


async def leads() -> None:
    rpc.barrier(timeout=5)


def test_a_group_operation_in_a_coroutine_of_its_leader_is_an_error(two: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"a group operation would block the event loop of worker 'w0'; use .*await"):
        two[1].rpc_sync("w0", leads)


async def starts_and_awaits() -> list[int]:
    gate = Gate()
    calls = [rpc.rpc_async("w0", calls_back, (gate,)) for _ in range(20)]
    gate.wait_for(20)
    gate.open()
    return [await call for call in calls]


def calls_back(gate: Gate) -> int:
    gate.enter()
    return int(rpc.rpc_sync("w1", double, (1,)))


def test_awaited_calls_may_need_coroutines_of_the_same_worker() -> None:
    assert rpc.rpc_sync("w1", starts_and_awaits, timeout=20) == [2] * 20


async def waits_for_what_is_done() -> list[int]:
    futures = [rpc.rpc_async("w0", echo, (i,)) for i in range(3)]
    await asyncio.gather(*futures)
    return [future.wait() for future in futures] + rpc.wait_all(futures)


def test_waiting_for_completed_futures_does_not_block() -> None:
    assert rpc.rpc_sync("w1", waits_for_what_is_done) == [0, 1, 2] * 2


def test_no_call_is_counted_before_the_error() -> None:
    """The error comes before references of the arguments are shared."""
    with cluster(2, check=True) as group:
        ref = group[0].remote("w0", echo, (5,))
        with pytest.raises(RuntimeError, match="would block"):
            group[0].rpc_sync("w1", passes_on, (ref,))


async def passes_on(ref: Any) -> Any:
    return rpc.rpc_sync("w0", echo, (ref,))


async def holds(tensor: torch.Tensor, held: Local[list[Any]]) -> None:
    held.value.append(weakref.ref(tensor))
    await asyncio.sleep(60)


@pytest.mark.parametrize("timeout", [60, 0.1])
def test_a_stopped_handler_releases_its_arguments_without_the_garbage_collector(timeout: float) -> None:
    held: Local[list[Any]] = Local([])
    gc.disable()
    try:
        future = rpc.rpc_async("w1", holds, (torch.ones(3), held), timeout=timeout)
        eventually(lambda: held.value)
        if timeout > 1:
            future.cancel()
        with pytest.raises((Cancelled, RpcTimeout)):
            future.wait()
        eventually(lambda: held.value[0]() is None)
    finally:
        gc.enable()


def compute(log: Local[Log]) -> None:
    log.value.begin()
    eventually(rpc.cancelled)
    log.value.lines.append("canceled")


async def computes_in_thread(log: Local[Log]) -> None:
    await asyncio.to_thread(compute, log)


def test_a_thread_of_a_canceled_coroutine_asks() -> None:
    log = Log()
    future = rpc.rpc_async("w1", computes_in_thread, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    log.expect("begun", "canceled")


loops: list[asyncio.Task[None]] = []  # tasks that outlive their handlers


async def starts_loop(log: Local[Log]) -> None:
    async def serve() -> None:
        while "go on" not in log.value.lines:
            await asyncio.sleep(0.001)
        log.value.lines.append(f"canceled: {rpc.cancelled()}, {await asyncio.to_thread(rpc.cancelled)}")

    loops.append(asyncio.get_running_loop().create_task(serve()))
    log.value.begin()
    await asyncio.sleep(60)


def test_a_task_that_outlives_a_canceled_coroutine_goes_on() -> None:
    log = Log()
    future = rpc.rpc_async("w1", starts_loop, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    eventually(lambda: not rpc.rpc_sync("w1", pending_handlers))
    log.lines.append("go on")
    log.expect("begun", "go on", "canceled: False, False")
    loops.clear()


def pending_handlers() -> int:
    return rpc.debug_info().counts.deferred_requests

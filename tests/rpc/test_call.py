"""``await rpc.call(...)``: calls as coroutines in tasks, groups and timeouts."""

import asyncio
import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout
from telegrad.testing import Cluster, Gate, eventually, run_all

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


class Counter:
    """Value for method calls through references."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, x: int) -> int:
        self.value += x
        return self.value

    def fail(self) -> None:
        raise ValueError("on purpose")


def add(x: int, y: int = 1) -> int:
    return x + y


async def add_later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


def fail_after(gate: Gate) -> None:
    gate.enter()
    fail("after the wait for it was canceled")


def test_it_works_in_tasks_and_groups() -> None:
    async def main() -> list[Any]:
        made = rpc.call("w1", add, (1,), {"y": 2})
        assert asyncio.iscoroutine(made)
        results = [await made, *await asyncio.gather(*(rpc.call("w1", add, args=(i,)) for i in range(20)))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rpc.call(to, add_later, (10,))) for to in ("w0", "w1", 1)]
        results += [task.result() for task in tasks]
        results.append(await asyncio.wait_for(rpc.call("w1", add, (5,)), 10))
        return results

    assert asyncio.run(main()) == [3, *range(1, 21), 11, 11, 11, 6]


def test_it_starts_when_awaited() -> None:
    async def main() -> int:
        gate = Gate()
        made = rpc.call("w1", gate.enter, (7,))
        assert not gate.entered.acquire(blocking=False)
        gate.open()
        return await made

    assert asyncio.run(main()) == 7


def test_awaits_hold_no_threads(two: Cluster, busy_threads: Callable[[Cluster], set[threading.Thread]]) -> None:
    async def main(gate: Gate) -> None:
        before = busy_threads(two)
        tasks = [asyncio.create_task(rpc.call("w1", wait_on, (gate,))) for _ in range(200)]
        await rpc.call("w1", add, (1,))  # sent after the others
        eventually(lambda: busy_threads(two) <= before, what="the end of all threads but those before the waits")
        gate.open()
        assert await asyncio.gather(*tasks) == [True] * 200

    gate = Gate()
    try:
        asyncio.run(main(gate))
    finally:
        gate.open()


async def wait_on(gate: Gate) -> bool:
    while not gate.is_open():
        await asyncio.sleep(0.001)
    return True


def test_errors_and_timeouts() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            await rpc.call("w1", fail)
        with pytest.raises(TypeError, match="should be callable"):
            await rpc.call("w1", None)  # type: ignore[call-overload]
        gate = Gate()
        with pytest.raises(RpcTimeout):
            await rpc.call("w1", gate.enter, timeout=0.05)
        gate.open()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(rpc.call("w1", fail))
        assert caught.group_contains(ValueError, match="on purpose")

    asyncio.run(main())


def test_calls_through_workers_and_references(two: Cluster) -> None:
    async def main() -> None:
        assert await two[1].call("w0", add, (1,)) == 2
        assert await asyncio.create_task(two[1].call(0, rpc.get_worker_info)) == two[0].info
        counter = rpc.remote("w1", Counter, (5,))
        made = counter.call().add(1)
        assert asyncio.iscoroutine(made)
        assert await made == 6
        assert sorted(await asyncio.gather(*(counter.call(10).add(1) for _ in range(3)))) == [7, 8, 9]
        with pytest.raises(ValueError, match="on purpose"):
            await counter.call().fail()

    asyncio.run(main())


def test_in_a_handler(two: Cluster) -> None:
    assert rpc.rpc_sync("w1", sum_of, (["w0", "w1"], 3)) == 8


async def sum_of(workers: list[str], x: int) -> int:
    return sum(await asyncio.gather(*(rpc.call(worker, add, (x,)) for worker in workers)))


def test_without_a_group() -> None:
    async def main() -> None:
        with pytest.raises(NotInitialized):
            await rpc.call("w1", add, (1,))

    run_all([lambda: asyncio.run(main())])  # its thread has no current worker


async def through_a_future(gate: Gate) -> Any:
    return await rpc.rpc_async("w1", fail_after, (gate,))


@pytest.mark.parametrize("make", [lambda gate: rpc.call("w1", fail_after, (gate,)), through_a_future])
@pytest.mark.parametrize("fails", ["while the loop runs", "after the loop"])
def test_a_canceled_await_leaks_nothing_and_logs_nothing(
    two: Cluster, caplog: pytest.LogCaptureFixture, make: Any, fails: str
) -> None:
    def under_way() -> int:
        return two[0]._worker.engine.stats()["pending_calls"]

    def running() -> int:
        return two[1]._worker.engine.stats()["running_requests"]

    async def main(gate: Gate) -> None:
        asyncio.get_running_loop().slow_callback_duration = math.inf  # else the log says how slow a loaded machine is
        task = asyncio.create_task(make(gate))
        await asyncio.to_thread(gate.wait_for)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert under_way() == 0  # although the callee runs on
        if fails == "while the loop runs":
            gate.open()
            await asyncio.to_thread(eventually, lambda: running() == 0)

    gate = Gate()
    here = weakref.ref(gate)
    with caplog.at_level(logging.WARNING):
        asyncio.run(main(gate), debug=True)
        gate.open()
        del gate
        eventually(lambda: running() == 0)
        eventually(lambda: gc.collect() is not None and here() is None)
    assert not [r for r in caplog.records if "did not" in r.getMessage() or r.name == "asyncio"]

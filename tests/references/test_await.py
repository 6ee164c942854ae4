"""``await rref`` returns the value of `to_here` without blocking the event loop."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, RRefDeleted
from telegrad.testing import Cluster, Gate, eventually


class Tracked:
    pass


def pair() -> tuple[int, torch.Tensor]:
    return 1, torch.ones(3)


def fail() -> None:
    raise ValueError("on purpose")


def fail_after(gate: Gate) -> None:
    gate.enter()
    fail()


def quiet(w: Cluster) -> None:
    for worker in w:
        eventually(lambda worker=worker: worker._worker.engine.stats()["pending_calls"] == 0)  # type: ignore[misc]


def test_the_value(w: Cluster) -> None:
    async def main() -> None:
        made = rpc.remote("w1", pair)
        number, tensor = await made
        assert number == 1
        assert torch.equal(tensor, torch.ones(3))
        assert (await made)[1] is not tensor  # a copy, like to_here's
        assert [x.item() for x in await asyncio.gather(*(rpc.remote("w2", torch.tensor, (i,)) for i in range(20)))] == [
            *range(20)
        ]
        assert await asyncio.wait_for(rpc.remote("w1", max, (1, 2)), 10) == 2

    asyncio.run(main())


def test_on_the_owner_it_is_the_value_itself(w: Cluster) -> None:
    async def main() -> None:
        value = Tracked()
        assert await rpc.RRef(value) is value
        made = rpc.remote("w0", Tracked)
        assert await made is made.local_value()

    asyncio.run(main())


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_the_loop_runs_until_the_value_exists(
    w: Cluster, owner: str, busy_threads: Callable[[Cluster], set[threading.Thread]]
) -> None:
    async def main() -> Any:
        made = rpc.remote(owner, gate.enter, ("late", 30.0))  # longer than `eventually` waits
        await asyncio.to_thread(gate.wait_for)
        before = busy_threads(w)  # among them the one at the gate
        waiting = [asyncio.ensure_future(made) for _ in range(20)]
        assert await rpc.call(owner, max, (1, 2)) == 2  # sent after the others
        eventually(lambda: busy_threads(w) <= before, what="the end of all threads but those before the waits")
        assert not any(task.done() for task in waiting)
        gate.open()
        return await asyncio.gather(*waiting)

    gate = Gate()
    try:
        assert asyncio.run(main()) == ["late"] * 20
    finally:
        gate.open()
    quiet(w)


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_errors_of_the_creation(w: Cluster, owner: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for _ in range(2):
            made = rpc.remote(owner, fail)
            with pytest.raises(ValueError, match="on purpose"):
                await made
            with pytest.raises(ValueError, match="on purpose"):
                await made

    with caplog.at_level(logging.WARNING, "telegrad"):
        asyncio.run(main())
        gc.collect()
    assert not [r for r in caplog.records if "did not" in r.getMessage()]


def test_the_default_timeout_applies(w: Cluster) -> None:
    calls = w[0]._worker.calls

    async def main(gate: Gate) -> None:
        for owner in ("w0", "w1"):
            made = rpc.remote(owner, gate.enter, timeout=0)
            with pytest.raises(RpcTimeout):
                await made

    before, gate = calls.default_timeout, Gate()
    calls.default_timeout = 50_000_000
    try:
        asyncio.run(main(gate))
    finally:
        calls.default_timeout = before
        gate.open()
    quiet(w)


@pytest.mark.parametrize("owner", ["w0", "w1"])
def test_a_canceled_await_leaks_and_logs_nothing(w: Cluster, owner: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(gate: Gate) -> None:
        asyncio.get_running_loop().slow_callback_duration = 3600  # its warnings are about the machine
        made = rpc.remote(owner, fail_after, (gate,))
        task = asyncio.ensure_future(made)
        await asyncio.to_thread(gate.wait_for)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gate = Gate()
    here = weakref.ref(gate)
    with caplog.at_level(logging.WARNING):
        asyncio.run(main(gate), debug=True)
        gate.open()
        del gate
        quiet(w)
        eventually(lambda: gc.collect() is not None and here() is None)
        for worker in w:
            eventually(lambda worker=worker: not worker._worker.references.values)  # type: ignore[misc]
    assert not [r for r in caplog.records if "did not" in r.getMessage() or r.name == "asyncio"]


def test_a_canceled_reference() -> None:
    from telegrad.testing import cluster

    async def main(made: rpc.RRef[Any]) -> None:
        with pytest.raises((RRefDeleted, RuntimeError)):
            await made

    with cluster(2) as workers:
        made = rpc.remote("w1", Tracked)
        made.to_here()
    del workers
    asyncio.run(main(made))

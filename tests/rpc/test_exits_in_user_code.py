"""SystemExit, KeyboardInterrupt and CancelledError in user code.

They raise at the caller and end no thread and no event loop.
"""

import asyncio
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.testing import Cluster, eventually

KINDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError]
TIMEOUT = 10.0  # s
options = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def everything_still_runs(clean: Cluster, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check after each test: no internal error logged, all kinds of handlers run."""
    loop, engines = rpc.rpc_sync("w1", thread_of_loop), [worker._worker.engine for worker in clean]
    with caplog.at_level(logging.WARNING, "telegrad"):
        yield
        assert rpc.rpc_sync("w1", thread_of_loop) == loop
        assert rpc.rpc_async("w1", plain).wait() == 1
        eventually(lambda: not any(engine.stats()["running_handlers"] for engine in engines))
        said = [*caplog.get_records("call"), *caplog.records]  # until now
        assert not [r for r in said if "Telegrad's own" in r.getMessage()]
    for worker, engine in zip(clean, engines, strict=True):
        eventually(
            lambda engine=engine, pool=worker._worker.pool: engine.stats()["pool_threads"] == len(pool.threads())  # type: ignore[misc]
        )


async def thread_of_loop() -> int:
    return threading.get_ident()


def plain() -> int:
    return 1


def throw(kind: type[BaseException]) -> Any:
    raise kind("on purpose")


class Reduced:
    """Value that raises when pickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        throw(self.kind)


class Stateful:
    """Value that raises when unpickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __setstate__(self, state: Any) -> None:
        throw(state["kind"])


class Broken(Exception):
    """Exception with methods that all raise."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def __reduce__(self) -> Any:
        throw(self.kind)

    def __repr__(self) -> str:
        return str(throw(self.kind))

    __str__ = __repr__


def reduced(kind: type[BaseException]) -> Any:
    return Reduced(kind)


async def reduced_later(kind: type[BaseException]) -> Any:
    await asyncio.sleep(0)
    return Reduced(kind)


@rpc.functions.async_execution
def reduced_in_a_future(kind: type[BaseException]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(Reduced(kind))
    return future


def stateful(kind: type[BaseException]) -> Any:
    return Stateful(kind)


def broken(kind: type[BaseException]) -> None:
    raise Broken(kind)


async def broken_later(kind: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise Broken(kind)


WAYS: dict[str, Callable[..., Any]] = {
    "sync": rpc.rpc_sync,
    "async": lambda *call: rpc.rpc_async(*call).wait(),
    "remote": lambda *call: rpc.remote(*call).to_here(),
}
ways = pytest.mark.parametrize("way", list(WAYS))


# ---- at the callee


@options
@ways
@pytest.mark.parametrize("function", [reduced, reduced_later, reduced_in_a_future, broken, broken_later])
def test_a_result_that_cannot_be_encoded_raises_at_the_caller(
    function: Any, way: str, kind: type[BaseException]
) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            WAYS[way]("w1", function, (kind,))


@options
@ways
def test_an_argument_that_cannot_be_decoded_raises_at_the_caller(way: str, kind: type[BaseException]) -> None:
    with pytest.raises(RuntimeError, match=kind.__name__):
        WAYS[way]("w1", plain, (Stateful(kind),))


class Held:
    pass


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_while_a_result_is_decoded_keeps_no_frames(kind: type[BaseException]) -> None:
    def wait() -> "weakref.ref[Held]":
        held = Held()  # in the frame of the caller
        with pytest.raises(kind):
            rpc.rpc_async("w1", stateful, (kind,)).wait()
        return weakref.ref(held)

    gone = wait()
    gc.collect()
    assert gone() is None


@options
def test_a_method_of_a_reference(kind: type[BaseException]) -> None:
    rref = rpc.remote("w1", dict, ([("key", 1)],))
    with pytest.raises(RuntimeError, match=kind.__name__):
        rref.rpc_sync().update(Stateful(kind))
    assert rref.rpc_sync().get("key") == 1


class ExitsInFinalizer:
    def __init__(self, kind: type[BaseException], gone: list[int]) -> None:
        self.kind, self.gone = kind, gone

    def __del__(self) -> None:
        self.gone.append(1)
        throw(self.kind)


def leaves(kind: type[BaseException]) -> bool:
    """Return with a value that dies with the handler's frame."""
    gone: list[int] = []
    ExitsInFinalizer(kind, gone)
    return gone == [1]


@options
def test_a_finalizer(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: told.set())
    assert rpc.rpc_sync("w1", leaves, (kind,))
    assert told.wait(TIMEOUT)


# ---- on the event loop


async def starts_a_task(kind: type[BaseException]) -> str:
    task = asyncio.create_task(throws(kind))
    await asyncio.wait([task])
    return "cancelled" if task.cancelled() else type(task.exception()).__name__


async def throws(kind: type[BaseException]) -> None:
    await asyncio.sleep(0)
    throw(kind)


async def calls_soon(kind: type[BaseException]) -> int:
    asyncio.get_running_loop().call_soon(throw, kind)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return 1


async def stops_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 1


@options
def test_a_task_of_a_handler(kind: type[BaseException]) -> None:
    known = "cancelled" if kind is asyncio.CancelledError else kind.__name__
    assert rpc.rpc_sync("w1", starts_a_task, (kind,)) == known


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_the_loop(kind: type[BaseException]) -> None:
    assert rpc.rpc_sync("w1", calls_soon, (kind,)) == 1


def test_a_handler_that_stops_the_loop() -> None:
    assert rpc.rpc_sync("w1", stops_the_loop) == 1


# ---- at the caller


@options
def test_a_result_that_a_pool_thread_cannot_decode(kind: type[BaseException]) -> None:
    future = rpc.rpc_async("w1", stateful, (kind,))
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT)
    assert isinstance(future.failure(), kind)


@options
def test_a_creation_error_that_cannot_be_decoded(kind: type[BaseException]) -> None:
    rref = rpc.remote("w1", broken, (kind,))
    eventually(rref._get_future().done)
    with pytest.raises(RuntimeError):
        rref.to_here()


@options
def test_callbacks(kind: type[BaseException]) -> None:
    future = rpc.rpc_async("w1", plain)
    child = future.then(lambda _: throw(kind))
    broken_child = future.then(lambda _: broken(kind))
    future.add_done_callback(lambda _: throw(kind))
    for failed in (child, broken_child):
        with pytest.raises(RuntimeError, match="running the callback"):
            failed.wait()
    assert future.wait() == 1


class Hashed:
    """Callable that cannot be hashed."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __call__(self) -> int:
        return 1

    def __hash__(self) -> int:
        throw(self.kind)
        return 0


@options
def test_a_function_that_cannot_be_hashed_leaves_no_reference(clean: Cluster, kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        rpc.remote("w1", Hashed(kind))
    references = clean[0]._worker.references
    assert references.pending_creations == 0
    eventually(lambda: references.stats().handles == references.stats().users == 0)


@options
def test_an_argument_that_cannot_be_encoded_leaves_no_reference(clean: Cluster, kind: type[BaseException]) -> None:
    mine = rpc.RRef(1)
    for way in WAYS.values():
        with pytest.raises(kind):
            way("w1", plain, (mine, Reduced(kind)))
    references = clean[0]._worker.references
    assert references.pending_creations == 0
    assert references.stats().pins == references.stats().expected == 0


# ---- in a backward pass


def doubled(x: torch.Tensor, kind: type[BaseException]) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: broken(kind))
    return y


@options
def test_hooks_of_a_pass(kind: type[BaseException]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", doubled, (x, kind)).sum()
        with pytest.raises(RuntimeError):
            autograd.backward(context_id, [loss])


@options
def test_only_the_main_thread_raises_what_completes_a_future(clean: Cluster, kind: type[BaseException]) -> None:
    """There a signal handler may have raised it."""
    fail, future = clean[0]._worker.calls.fail, type(rpc.rpc_async("w1", plain))
    here, in_thread = future([]), future([])
    with pytest.raises(kind):
        fail(here, kind())
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            fail(in_thread, kind())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(TIMEOUT)
    assert not raised
    for completed in (here, in_thread):
        with pytest.raises(kind):
            completed.value()

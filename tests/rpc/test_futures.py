"""Futures of calls: torch's API, asyncio, and logging of unread failures."""

import asyncio
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import Cancelled, RpcTimeout
from telegrad.testing import Cluster, Gate, cluster, eventually, run_all

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


def echo(x: Any) -> Any:
    return x


def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


def call(function: Any = echo, *args: Any) -> Any:
    return rpc.rpc_async("w1", function, args or ((1,) if function is echo else ()))


# ---- torch's futures


def test_it_is_a_torch_future() -> None:
    future = call()
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert future.wait() == 1
    assert future.done()
    assert future.value() == 1
    assert future.wait() == 1


def test_collect_all_and_wait_all() -> None:
    futures = [call(echo, i) for i in range(10)]
    assert torch.futures.wait_all(futures) == list(range(10))
    futures = [call(echo, torch.full((2,), float(i))) for i in range(10)]
    done = torch.futures.collect_all(futures).wait()
    assert [f.wait()[0].item() for f in done] == list(range(10))
    mine: torch.futures.Future[int] = torch.futures.Future()
    mine.set_result(7)
    assert torch.futures.wait_all([mine, call()]) == [7, 1]
    assert torch.futures.wait_all([]) == []


def test_collect_all_and_wait_all_raise() -> None:
    with pytest.raises(ValueError, match="on purpose"):
        torch.futures.wait_all([call(), call(fail)])
    with pytest.raises(ValueError, match="on purpose"):
        torch.futures.collect_all([call(), call(fail)]).wait()


def test_then_and_callbacks() -> None:
    assert call().then(lambda done: done.wait() + 1).then(lambda done: done.value() * 10).wait() == 20
    with pytest.raises(Exception, match="on purpose"):
        call(fail).then(lambda done: done.wait()).wait()
    assert isinstance(call(fail).then(caught).wait(), ValueError)
    done = threading.Event()
    seen: list[Any] = []

    def callback(future: Any) -> None:
        seen.append(future.value())
        done.set()

    future = call()
    future.add_done_callback(callback)
    assert done.wait(10)  # no thread waits for the future
    assert seen == [1]
    future.add_done_callback(callback)  # at once now
    assert seen == [1, 1]


def caught(done: Any) -> Exception | None:
    try:
        done.wait()
    except Exception as e:
        return e
    return None


def test_values_that_are_no_callback_raise() -> None:
    for add in (call().then, call().add_done_callback):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            add(None)


def test_callbacks_run_in_the_pool_and_may_make_calls() -> None:
    gate = Gate()
    chained = rpc.rpc_async("w1", gate.enter, (5,)).then(
        lambda done: (threading.current_thread().name, rpc.rpc_sync("w1", echo, (done.value() + 1,)))
    )
    gate.wait_for()
    gate.open()
    name, value = chained.wait()
    assert name.startswith("telegrad-w0-")
    assert value == 6


def test_a_failing_callback_affects_no_other() -> None:
    future = call()
    chained = future.then(lambda _: fail("in the callback"))
    with pytest.raises(Exception, match="in the callback"):
        chained.wait()
    assert future.wait() == 1
    assert call().wait() == 1


def test_a_failing_done_callback_is_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    future = call()
    future.add_done_callback(lambda _: fail("in the callback"))
    assert future.wait() == 1
    eventually(lambda: caplog.records)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("telegrad", logging.ERROR)
    assert record.getMessage() == "a callback of the future of echo raised"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "in the callback"
    assert "running the callback" not in capfd.readouterr().err


def test_done_does_not_wait() -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter, ("x",))
    gate.wait_for()
    assert not future.done()
    gate.open()
    eventually(future.done)
    assert future.value() == "x"


# ---- waiting


def test_many_threads_wait_for_one_future() -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter, (3,))
    gate.wait_for()
    waiting = threading.Barrier(9)

    def wait() -> Any:
        waiting.wait(10)
        return future.wait()

    def release() -> Any:
        waiting.wait(10)
        gate.open()
        return future.wait()

    assert run_all([wait] * 8 + [release]) == [3] * 9


def test_one_thread_waits_in_any_order() -> None:
    gates = [Gate() for _ in range(4)]
    futures = [rpc.rpc_async("w1", gate.enter, (i,)) for i, gate in enumerate(gates)]
    for i in (2, 0, 3, 1):
        gates[i].open()
        assert futures[i].wait() == i
        assert [f.done() for f in futures].count(True) == (2, 0, 3, 1).index(i) + 1


def waits(to: str, *args: Any) -> Any:
    return rpc.rpc_async(to, echo, args).wait()


def test_wait_in_a_handler() -> None:
    assert rpc.rpc_sync("w1", waits, ("w0", 5)) == 5
    assert rpc.rpc_sync("w1", waits, ("w1", 6)) == 6
    assert [f.wait() for f in [rpc.rpc_async("w1", waits, ("w0", i)) for i in range(40)]] == list(range(40))


def test_the_same_error_each_time() -> None:
    future = call(fail)
    for read in (future.wait, future.wait, future.value, future.value):
        with pytest.raises(ValueError, match="on purpose") as caught_error:
            read()
        assert caught_error.value.args == ("on purpose",)
        assert len(caught_error.traceback) <= 4  # the traceback does not grow with every read


def test_a_dropped_future_still_runs() -> None:
    gate = Gate()
    rpc.rpc_async("w1", gate.enter)
    gate.wait_for()
    gate.open()


# ---- asyncio


def test_await() -> None:
    async def main() -> Any:
        first = await call(echo, 1)
        rest = await asyncio.gather(*(call(echo, i) for i in range(50)))
        with pytest.raises(ValueError, match="on purpose"):
            await call(fail)
        done = call(echo, "done before")
        done.wait()
        return first, rest, await done

    assert asyncio.run(main()) == (1, list(range(50)), "done before")


def test_await_what_a_callback_returns() -> None:
    async def main() -> Any:
        chained = call(echo, 1).then(lambda done: done.value() + 1)
        assert isinstance(chained, torch.futures.Future)
        again = chained.then(lambda done: done.value() * 10)
        with pytest.raises(ValueError, match="on purpose"):
            await call(fail).then(lambda done: done.value())
        with pytest.raises(RuntimeError, match="when running the callback: KeyError: 'mine'") as caught_error:
            await call().then(lambda _: {}["mine"])
        assert isinstance(caught_error.value.__cause__, KeyError)
        return await chained, await again, torch.futures.wait_all([again])

    assert asyncio.run(main()) == (2, 20, [20])


def test_the_loop_runs_while_a_call_is_awaited() -> None:
    gate = Gate()

    async def main() -> Any:
        future = rpc.rpc_async("w1", gate.enter, ("late",))
        asyncio.get_running_loop().call_soon(gate.open)  # would never run if the call blocked the loop
        return await future

    assert asyncio.run(main()) == "late"


def test_await_with_a_deadline_cancels_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()

    async def main() -> Any:
        nonlocal future
        future = rpc.rpc_async("w1", gate.enter, ("late",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    future: Any = None
    asyncio.run(main())
    gate.open()
    with pytest.raises(Cancelled):  # as with a future of asyncio, the end of the await cancels the call
        future.wait()
    assert capfd.readouterr() == ("", "")


def test_await_from_several_loops() -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter, (4,))

    async def main() -> Any:
        return await future

    def release() -> Any:
        gate.wait_for()
        gate.open()

    assert run_all([*[lambda: asyncio.run(main())] * 3, release])[:3] == [4] * 3


def test_awaited_stop_iteration_does_not_end_the_coroutine() -> None:
    async def main() -> Any:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await rpc.rpc_async("w1", next, (iter([]),))

    asyncio.run(main())


# ---- unread failures


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    def messages() -> list[str]:
        gc.collect()
        return [r.getMessage() for r in caplog.records if r.name == "telegrad"]

    caplog.set_level(logging.WARNING, "telegrad")
    return messages


def test_an_unread_failure_is_logged(logged: Any) -> None:
    future = call(fail, "unheard")
    eventually(future.done)
    assert logged() == []
    del future
    eventually(logged)
    (message,) = logged()
    assert "unheard" in message
    assert "fail" in message
    assert "did not read" in message


@pytest.mark.parametrize("make", [lambda: call(fail), lambda: call().then(fail_again)], ids=["call", "then"])
def test_a_finalizer_does_not_log(logged: Any, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    """A finalizer may run inside of a logging call of its thread."""
    future = make()
    eventually(future.done)
    ran = threading.Event()
    weakref.finalize(future, ran.set)
    del future
    eventually(ran.is_set)
    eventually(logged)
    (record,) = [r for r in caplog.records if r.name == "telegrad"]
    assert (record.threadName or "").startswith("telegrad-w")


def fail_again(_: Any) -> None:
    raise ValueError("again")


def test_a_failure_is_logged_after_its_worker_has_closed(logged: Any) -> None:
    with cluster(2) as group:
        future = group[0].rpc_async("w1", fail)
        eventually(future.done)
    del future
    gc.collect()
    with cluster(1):
        pass
    (message,) = logged()
    assert "did not read" in message


def test_an_unread_failure_of_a_dropped_call_is_logged(logged: Any) -> None:
    rpc.rpc_async("w1", fail, ("dropped at once",))
    eventually(lambda: any("dropped at once" in m for m in logged()))


@pytest.mark.parametrize(
    "begin",
    [
        lambda: call(fail).then(lambda done: done.value()),
        lambda: call(fail).then(lambda _: None),
        lambda: call(fail).add_done_callback(lambda _: None),
        lambda: call().then(lambda _: fail()),
        lambda: rpc.remote("w1", fail),
    ],
    ids=["then reads", "then does not", "callback", "callback fails", "remote"],
)
def test_a_failure_is_logged_if_no_code_reads_it(logged: Any, begin: Any) -> None:
    begin()
    eventually(logged)
    (message,) = logged()
    assert "on purpose" in message or message.startswith("fail failed, and the program did not use its reference")


def use(rref: Any) -> Any:
    with pytest.raises(ValueError, match="on purpose"):
        rref.to_here()


@pytest.mark.parametrize(
    "see",
    [
        use,
        lambda rref: rpc.rpc_sync("w1", use, (rref,)),
        lambda rref: caught(rref._get_future()),
    ],
    ids=["use", "use elsewhere", "its future"],
)
def test_a_failure_of_a_reference_that_is_used_is_not_logged(logged: Any, see: Any) -> None:
    rref = rpc.remote("w1", fail)
    see(rref)
    eventually(rref._get_future().done)
    del rref
    assert logged() == []


async def awaits(future: Any) -> None:
    await future


@pytest.mark.parametrize(
    "read",
    [
        lambda f: f.wait(),
        lambda f: (eventually(f.done), f.value()),
        lambda f: f.then(lambda done: done.wait()).wait(),
        lambda f: torch.futures.wait_all([f]),
        lambda f: torch.futures.collect_all([f]).wait(),
        lambda f: asyncio.run(awaits(f)),
    ],
    ids=["wait", "value", "then", "wait_all", "collect_all", "await"],
)
def test_a_failure_that_is_read_is_not_logged(logged: Any, read: Any) -> None:
    with pytest.raises(Exception, match="on purpose"):
        read(call(fail))
    assert logged() == []


def test_success_is_not_logged(logged: Any) -> None:
    future = call()
    eventually(future.done)
    del future
    assert logged() == []


def test_reading_a_failure_leaves_no_garbage(two: Cluster) -> None:
    """The exception references its traceback, frames, the future and so itself."""
    gc.collect()
    gc.disable()
    try:
        future = call(fail)
        watch = weakref.ref(future)
        try:
            future.wait()
        except ValueError:
            pass
        del future
        assert watch() is None
    finally:
        gc.enable()


def test_every_way_of_reading_raises_the_timeout() -> None:
    gate = Gate()
    for read in (lambda f: f.wait(), lambda f: asyncio.run(awaits(f)), lambda f: torch.futures.wait_all([f])):
        future = rpc.rpc_async("w1", gate.enter, timeout=0.05)
        with pytest.raises(RpcTimeout, match="RPC ran for more than set timeout"):
            read(future)
    gate.open()

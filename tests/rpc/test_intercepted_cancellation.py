"""Cancellation and timeouts of calls within interceptors and fault injection."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cancellation_helpers import Log

from telegrad import rpc
from telegrad.errors import Cancelled, NotInitialized, RpcTimeout
from telegrad.testing import Cluster, Gate, Local, cluster, eventually
from telegrad.worker.calls.future import CallFuture

pytestmark = [pytest.mark.usefixtures("clean", "quiet"), pytest.mark.filterwarnings("error")]


@pytest.fixture
def log() -> Log:
    return Log()


def polls(log: Local[Log]) -> str:
    log.value.begin()
    eventually(rpc.cancelled)
    log.value.lines.append("canceled")
    return "dropped"


async def sleeps(log: Local[Log]) -> None:
    log.value.begin()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        log.value.lines.append("canceled")
        raise


@rpc.functions.async_execution
def calls_sleeps(log: Local[Log]) -> Any:
    return rpc.rpc_async("w0", sleeps, (log,))


HANDLERS = [polls, sleeps, calls_sleeps]


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


def derived(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call).then(lambda done: done.value())


def own_future(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    """Return a future that `then` has not made."""
    outer: CallFuture[Any] = CallFuture._of()
    future: Any = proceed(call)

    def complete(done: Any) -> None:
        error = done.failure()
        if error is None:
            outer.set_result(done.value())
        else:
            outer.set_exception(error)

    future.add_done_callback(complete)
    return outer


INTERCEPTORS = [through, derived, own_future]


@pytest.fixture
def serve(two: Cluster) -> Iterator[Any]:
    registrations = []

    def register(interceptor: Any) -> None:
        for worker in two:
            with worker:
                registrations.append(rpc.intercept(server=interceptor))

    yield register
    for registration in registrations:
        registration.remove()


# ---- at the caller


@pytest.mark.parametrize("interceptor", INTERCEPTORS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_future_cancels_the_call_behind_interceptors(log: Log, handler: Any, interceptor: Any) -> None:
    with rpc.intercept(client=through), rpc.intercept(client=interceptor):
        future = rpc.rpc_async("w1", handler, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    assert not future.cancel()
    with pytest.raises(Cancelled, match=f"{handler.__name__} on w1 was canceled"):
        future.wait()
    log.expect("begun", "canceled")


def test_the_future_of_then_cancels_it(log: Log) -> None:
    with rpc.intercept(client=own_future):
        future = rpc.rpc_async("w1", sleeps, (log.local,)).then(lambda done: done.value())
    log.wait_for_begin()
    assert future.cancel()
    with pytest.raises(Cancelled):
        future.wait()
    log.expect("begun", "canceled")


@pytest.mark.parametrize("interceptor", INTERCEPTORS)
def test_a_canceled_await_reaches_the_callee(log: Log, interceptor: Any) -> None:
    async def main() -> None:
        with rpc.intercept(client=interceptor):
            task = asyncio.create_task(rpc.call("w1", sleeps, (log.local,)))
            await asyncio.to_thread(log.wait_for_begin)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    log.expect("begun", "canceled")


def test_another_thread_cancels_while_one_waits(log: Log) -> None:
    with rpc.intercept(client=through):
        future = rpc.rpc_async("w1", sleeps, (log.local,))

    def cancel() -> None:
        log.wait_for_begin()
        future.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(Cancelled):
        future.wait()
    thread.join()
    log.expect("begun", "canceled")


def test_an_interceptor_sees_the_cancellation_but_cannot_undo_it(log: Log) -> None:
    seen: list[object] = []

    def answers(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        def value(done: Any) -> str:
            seen.append(type(done.failure()))
            return "instead"

        return proceed(call).then(value)

    with rpc.intercept(client=answers):
        future = rpc.rpc_async("w1", sleeps, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    assert seen == [Cancelled]
    with pytest.raises(Cancelled):
        future.wait()
    log.expect("begun", "canceled")


def test_a_canceled_call_is_not_tried_again(log: Log) -> None:
    def retries(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(call).then(lambda _: proceed(call).wait())

    with rpc.intercept(client=retries):
        future = rpc.rpc_async("w1", sleeps, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    log.expect("begun", "canceled")


# ---- at the callee


@pytest.mark.parametrize("interceptor", INTERCEPTORS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_handlers_behind_interceptors_are_canceled(log: Log, serve: Any, handler: Any, interceptor: Any) -> None:
    serve(through)
    serve(interceptor)
    future = rpc.rpc_async("w1", handler, (log.local,))
    log.wait_for_begin()
    assert future.cancel()
    log.expect("begun", "canceled")


def test_a_server_interceptor_cancels_a_handler(log: Log, serve: Any) -> None:
    def cancels(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        future: Any = proceed(call)
        log.wait_for_begin()
        future.cancel()
        return future

    serve(cancels)
    with pytest.raises(Cancelled):
        rpc.rpc_sync("w1", sleeps, (log.local,))
    log.expect("begun", "canceled")


# ---- timeouts


def start_and_wait(*args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_async(*args, **kwargs).wait()


@pytest.mark.parametrize("call", [rpc.rpc_sync, start_and_wait])
def test_a_result_that_never_comes_exceeds_the_timeout(call: Any) -> None:
    with (
        rpc.intercept(client=lambda *_: torch.futures.Future()),
        pytest.raises(RpcTimeout, match="abs on w1") as caught,
    ):
        call("w1", abs, (1,), timeout=0.05)
    assert caught.value.state == "intercepted"
    assert caught.value.timeout == 0.05


def test_the_timeout_cancels_what_runs(log: Log) -> None:
    def never(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        outer: CallFuture[Any] = CallFuture._of()
        proceed(dataclasses.replace(call, timeout=0.3)).then(lambda _: None)
        return outer

    with rpc.intercept(client=never), pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", sleeps, (log.local,))
    log.expect("begun", "canceled")


def test_an_interceptor_may_remove_the_timeout() -> None:
    gate = Gate()

    def removes(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return own_future(dataclasses.replace(call, timeout=0), proceed)

    with rpc.intercept(client=removes):
        future = rpc.rpc_async("w1", gate.enter, (7,), timeout=1e-3)
        gate.wait_for()
        gate.open()
        assert future.wait() == 7


def test_callbacks_of_a_result_that_never_comes_run_on_a_pool_thread(two: Cluster) -> None:
    threads: list[threading.Thread] = []
    done = threading.Event()

    def note(future: Any) -> None:
        assert future.failure() is not None
        threads.append(threading.current_thread())
        done.set()

    with rpc.intercept(client=lambda *_: torch.futures.Future()):
        future = rpc.rpc_async("w1", abs, (1,), timeout=0.01)
    future.then(note)
    with pytest.raises(RpcTimeout):
        future.wait()
    assert done.wait(10)
    assert threads[0] in two[0]._worker.pool.threads()


@pytest.mark.parametrize("timeout", [0, 60])
def test_pending_calls_end_with_their_worker(timeout: float) -> None:
    with cluster(2, graceful=False):
        with rpc.intercept(client=delaying(60.0)):
            futures = [rpc.rpc_async("w1", abs, (-1,), timeout=timeout)]
        with rpc.intercept(client=lambda *_: torch.futures.Future()):
            futures.append(rpc.rpc_async("w1", abs, (-1,), timeout=timeout))
    for future in futures:
        eventually(future.done)
        with pytest.raises(NotInitialized, match="abs on w1 was pending when this worker shut down"):
            future.wait()


# ---- delays


def delaying(seconds: float) -> Any:
    """Return an interceptor that delays calls."""
    return lambda call, proceed: proceed(dataclasses.replace(call, delay=seconds))


@pytest.mark.parametrize("interceptor", [None, *INTERCEPTORS])
def test_a_delayed_call_is_canceled_before_it_is_sent(clean: Cluster, log: Log, interceptor: Any) -> None:
    delayed: list[Any] = []
    work = clean[0]._worker.calls.open_work
    original = work.delay, work._submit
    work.delay, work._submit = lambda _, send: delayed.append(send), lambda function, *arguments: function(*arguments)
    registrations = [rpc.intercept(client=each) for each in (interceptor, delaying(1.0)) if each]
    try:
        kept = rpc.RRef(torch.ones(2))  # a canceled request must release its references
        future = rpc.rpc_async("w1", polls, (log.local, kept), timeout=0)
        assert future.cancel()
        assert future.cancelled()
        for send in delayed:
            send()
    finally:
        work.delay, work._submit = original
        for registration in registrations:
            registration.remove()
    assert log.lines == []


@pytest.fixture
def later(clean: Cluster) -> Iterator[list[tuple[float, Any]]]:
    """Collect what worker 0 would run later, and the seconds until then."""
    work = clean[0]._worker.calls.open_work
    original, found = (work.delay, work._submit), []  # type: ignore[var-annotated]
    work.delay = lambda seconds, run: found.append((seconds, run))
    work._submit = lambda function, *arguments: function(*arguments)
    yield found
    work.delay, work._submit = original


def test_a_delay_counts_towards_the_timeout(log: Log, later: list[tuple[float, Any]]) -> None:
    with rpc.intercept(client=delaying(5.0)):
        future = rpc.rpc_async("w1", polls, (log.local,), timeout=1.0)
    (first, end), (last, send) = later
    assert (first, last) == (1.0, 5.0)
    assert not future.done()
    end()
    with pytest.raises(RpcTimeout, match="polls on w1"):
        future.wait()
    send()
    assert log.lines == []


def test_a_delayed_creation_that_times_out_is_sent_nevertheless(later: list[tuple[float, Any]]) -> None:
    with rpc.intercept(client=delaying(5.0)):
        rref = rpc.remote("w1", max, (1, 2), timeout=1.0)
    (_, end), (_, send) = later
    end()
    with pytest.raises(RpcTimeout):
        rref._get_future().wait()
    send()
    later.clear()
    del rref  # the late reply releases the value, which the fixture checks


@pytest.mark.parametrize("interceptor", [None, *INTERCEPTORS])
def test_a_delayed_call_is_canceled_after_it_was_sent(log: Log, interceptor: Any) -> None:
    registrations = [rpc.intercept(client=each) for each in (interceptor, delaying(0.001)) if each]
    try:
        future = rpc.rpc_async("w1", polls, (log.local,))
        log.wait_for_begin()
        assert future.cancel()
    finally:
        for registration in registrations:
            registration.remove()
    log.expect("begun", "canceled")

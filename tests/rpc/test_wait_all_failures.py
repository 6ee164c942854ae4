"""`wait_all` with failures, timeouts, lost peers and signals."""

import gc
import logging
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from waiting_helpers import call, echo, fail, held, unpickled, wait_until_in_core

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, WorkerLost
from telegrad.testing import Gate, Local, cluster, eventually
from telegrad.worker.calls.client import Calls
from telegrad.worker.unread_failures import log_unread

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


# ---- errors


def test_raises_at_the_first_error() -> None:
    gate = Gate()
    late = held(gate, "late")
    with pytest.raises(ValueError, match="on purpose"):
        rpc.wait_all([late, call(), call(fail), late])
    assert not late.done()
    gate.open()
    assert late.wait() == "late"


def test_logs_no_other_failure(caplog: pytest.LogCaptureFixture) -> None:
    futures = [call(fail) for _ in range(3)]
    eventually(lambda: all(future.done() for future in futures))
    with caplog.at_level(logging.WARNING):
        with pytest.raises(ValueError, match="on purpose"):
            rpc.wait_all(futures)
        ends = [weakref.ref(future) for future in futures]
        futures.clear()
        gc.collect()
        assert not any(end() for end in ends)
        log_unread()
    assert not caplog.records


def test_raises_at_an_earlier_error() -> None:
    gate = Gate()
    late, failed = held(gate), call(fail)
    with pytest.raises(ValueError, match="on purpose"):
        failed.wait()
    for futures in ([late, failed], [failed, late], [failed]):
        with pytest.raises(ValueError, match="on purpose"):
            rpc.wait_all(futures)
    assert not late.done()
    gate.open()
    late.wait()


def test_raises_at_an_error_of_another_kind_of_future() -> None:
    gate = Gate()
    late = held(gate)
    torchs: torch.futures.Future[int] = torch.futures.Future()
    torchs.set_exception(KeyError("torch's"))
    child = call().then(lambda _: fail("in a child"))
    for failed, text in ((torchs, "torch's"), (child, "in a child")):
        with pytest.raises(Exception, match=text):
            rpc.wait_all([late, failed])
    assert not late.done()
    gate.open()
    late.wait()


def test_raises_at_an_error_that_another_thread_is_decoding(in_thread: Any) -> None:
    """A pool thread is decoding a completion when this thread begins to wait."""
    reading, late = Gate(), Gate()

    def read() -> None:
        reading.enter()
        fail("cannot be read")

    read_here = Local(read)
    unreadable, never = call(unpickled, read_here), held(late, "late")
    reading.wait_for()  # in the pool
    errors: list[Any] = []

    def wait() -> None:
        with pytest.raises(ValueError, match="cannot be read") as caught:
            rpc.wait_all([never, unreadable])
        errors.append(caught.value)

    thread = in_thread(wait)
    wait_until_in_core(thread)
    reading.open()
    thread.join(10)
    assert not never.done()
    assert len(errors) == 1
    late.open()
    assert never.wait() == "late"


def test_waits_for_a_completion_that_another_thread_is_decoding(in_thread: Any) -> None:
    reading, late = Gate(), Gate()
    read = Local(lambda: reading.enter("read"))
    slow, other = call(unpickled, read), held(late, "late")
    reading.wait_for()
    values: list[Any] = []
    thread = in_thread(lambda: values.append(rpc.wait_all([other, slow])))
    wait_until_in_core(thread)
    late.open()
    eventually(other.done)
    assert not slow.done()
    reading.open()
    thread.join(10)
    assert values == [["late", "read"]]


def test_a_completion_that_cannot_be_decoded(in_thread: Any) -> None:
    gate = Gate()
    read = Local(lambda: fail("cannot be read"))
    unreadable = call(unpickled, read, gate)
    gate.wait_for()

    def wait() -> None:
        with pytest.raises(ValueError, match="cannot be read"):
            rpc.wait_all([unreadable])

    thread = in_thread(wait)
    wait_until_in_core(thread)
    gate.open()
    thread.join(10)
    with pytest.raises(ValueError, match="cannot be read"):
        unreadable.value()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exits_while_a_completion_is_decoded(in_thread: Any, kind: type[BaseException]) -> None:
    gate = Gate()

    def read() -> None:
        raise kind("while reading")

    read_here = Local(read)
    futures = [call(unpickled, read_here, gate), *(call(gate.enter, i) for i in range(3))]
    gate.wait_for(4)

    def wait() -> None:
        with pytest.raises(kind, match="while reading"):
            rpc.wait_all(futures)

    thread = in_thread(wait)
    wait_until_in_core(thread)
    gate.open()
    thread.join(10)
    with pytest.raises(kind, match="while reading"):
        futures[0].wait()
    assert [f.wait() for f in futures[1:]] == [0, 1, 2]


def test_timeouts() -> None:
    gate = Gate()
    late, other = call(gate.enter, timeout=0.05), call(gate.enter, "other")
    gate.wait_for(2)
    with pytest.raises(RpcTimeout, match="RPC ran for more than set timeout"):
        rpc.wait_all([other, late])
    gate.open()
    assert rpc.wait_all([other]) == ["other"]


def test_a_worker_that_is_lost(in_thread: Any) -> None:
    gate = Gate()
    mine = held(gate, "mine")
    with cluster(2, graceful=False) as group:
        its = [call(gate.enter, i) for i in range(3)]
        gate.wait_for(3)

        def wait() -> None:
            with pytest.raises(WorkerLost, match="w1"):
                rpc.wait_all(its)

        thread = in_thread(wait)
        wait_until_in_core(thread)
        closing = in_thread(lambda: group[1].shutdown(graceful=False))
        thread.join(10)
        for future in its:
            with pytest.raises(WorkerLost, match="w1"):
                future.wait()
        gate.open()
        closing.join(10)
    assert mine.wait() == "mine"


def test_a_worker_is_closed_during_the_wait(in_thread: Any) -> None:
    """Its futures all complete, also those without a waiting thread."""
    gate, ended = Gate(), threading.Semaphore(0)
    with cluster(2, graceful=False) as group:
        futures = [call(gate.enter, i) for i in range(3)]
        gate.wait_for(3)

        def wait() -> None:
            with pytest.raises(NotInitialized):
                rpc.wait_all(futures)

        thread = in_thread(wait)
        wait_until_in_core(thread)
        for future in futures:
            future.add_done_callback(lambda _: ended.release())
        group[0].shutdown(graceful=False)
        thread.join(10)
        for _ in futures:
            assert ended.acquire(timeout=10)
        gate.open()
    for future in futures:
        with pytest.raises(NotInitialized):
            rpc.wait_all([future])


# ---- signals


@pytest.fixture
def on_signal() -> Any:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


class Alarm(Exception):
    """Exception that the signal handler raises."""


def test_a_signal_ends_the_wait(on_signal: Any, in_thread: Any) -> None:
    def alarm(*_: object) -> None:
        raise Alarm

    gate = Gate()
    futures = [held(gate, i) for i in range(3)]
    on_signal(alarm)
    main = threading.main_thread()

    def send() -> None:
        wait_until_in_core(main)
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    in_thread(send)
    with pytest.raises(Alarm):
        rpc.wait_all(futures)
    gate.open()
    assert [f.wait() for f in futures] == [0, 1, 2]


def test_a_signal_while_a_future_is_being_completed(monkeypatch: pytest.MonkeyPatch, in_thread: Any) -> None:
    """No other thread has its completion, so it ends with the handler's exception."""
    gate = Gate()
    read = Local(echo)
    odd, other = call(unpickled, read, gate), held(gate, "other")
    gate.wait_for()
    interrupted = iter([True])
    result = Calls.result

    def interrupted_result(*given: Any) -> Any:
        if next(interrupted, False):
            raise Alarm
        return result(*given)

    monkeypatch.setattr(Calls, "result", interrupted_result)
    main = threading.current_thread()

    def open_late() -> None:
        wait_until_in_core(main)
        gate.open()

    in_thread(open_late)
    with pytest.raises(Alarm):
        rpc.wait_all([odd, other])
    assert odd.done()
    with pytest.raises(Alarm):
        odd.wait()
    assert other.wait() == "other"


# ---- leaks


def test_no_leaks() -> None:
    gc.collect()
    gc.disable()
    try:
        gate = Gate()
        late = held(gate)
        futures = [call(echo, frozenset({i})) for i in range(5)]
        watches = [weakref.ref(f) for f in futures]
        assert rpc.wait_all(futures) == [{i} for i in range(5)]
        del futures
        assert [w() for w in watches] == [None] * 5
        failed = call(fail)
        watch = weakref.ref(failed)
        try:
            rpc.wait_all([late, failed])
        except ValueError:
            pass
        del failed
        assert watch() is None
        gate.open()
        late.wait()
        watch = weakref.ref(late)
        del late
        assert watch() is None
    finally:
        gc.enable()

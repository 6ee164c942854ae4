"""Waiting for many calls at once: the thread that waits has their outcomes brought to it."""

import asyncio
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, WorkerLost
from telegrad.testing import Cluster, Gate, Local, cluster, eventually, run_all
from telegrad.worker import waiting

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


def echo(x: Any = 1) -> Any:
    return x


def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


def call(function: Any = echo, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_async("w1", function, args, **kwargs)


def held(gate: Gate, value: Any = None) -> Any:
    """A call that runs until the gate opens."""
    future = call(gate.enter, value)
    gate.wait_for()
    return future


class Unpickled:
    """Is read by calling a function of the test's, which the test keeps."""

    def __init__(self, read: Local[Callable[[], Any]]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return run_local, (self.read,)


def run_local(function: Local[Callable[[], Any]]) -> Any:
    return function.value()


def unpickled(read: Local[Callable[[], Any]], gate: Gate | None = None) -> Any:
    if gate is not None:
        gate.enter()
    return Unpickled(read)


@pytest.fixture
def in_thread() -> Any:
    """Runs something in a thread, which the test joins at its end."""
    threads = []

    def begin(function: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=function, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield begin
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def until_it_collects(thread: threading.Thread) -> None:
    """Waits until the thread is inside the core, which brings it what comes."""

    def collects() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code is waiting._collect.__code__

    eventually(collects)


def until_it_waits(thread: threading.Thread) -> None:
    """Waits until the thread is inside `wait_all`, however that waits."""

    def waits() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not waiting._wait_all.__code__:
            frame = frame.f_back
        return frame is not None

    eventually(waits)


# ---- values


def test_values_in_order() -> None:
    assert rpc.wait_all([]) == []
    assert rpc.wait_all([call(echo, i) for i in range(300)]) == list(range(300))
    assert rpc.wait_all(tuple(call(echo, i) for i in range(3))) == [0, 1, 2]
    assert rpc.wait_all([call(echo, None), call(echo, None)]) == [None, None]


def test_values_of_every_kind() -> None:
    gates = [Gate() for _ in range(3)]
    first, second, third = (held(gate, i) for i, gate in enumerate(gates))
    for gate in reversed(gates):
        gate.open()
    tensor, odd = torch.ones(2), frozenset({1})
    mixed = rpc.wait_all([third, call(echo, tensor), first, call(echo, odd), second])
    assert [mixed[0], mixed[2], mixed[4]] == [2, 0, 1]
    assert torch.equal(mixed[1], tensor)
    assert mixed[3] == odd


def test_the_same_future_more_than_once() -> None:
    gate = Gate()
    twice, once = held(gate, "twice"), call(echo, "once")
    gate.open()
    assert rpc.wait_all([twice, once, twice]) == ["twice", "once", "twice"]
    assert rpc.wait_all([twice, twice]) == ["twice", "twice"]  # it is over
    assert twice.value() == "twice"


def test_futures_are_complete_and_may_be_waited_for_again() -> None:
    futures = [call(echo, i) for i in range(20)]
    assert rpc.wait_all(futures) == rpc.wait_all(futures) == [f.value() for f in futures] == list(range(20))


def test_mixed_with_other_futures(two: Cluster) -> None:
    torchs: torch.futures.Future[int] = torch.futures.Future()
    torchs.set_result(7)
    of_the_other = two[1].rpc_async("w0", echo, (8,))
    child = call(echo, 1).then(lambda done: done.value() + 1)
    assert rpc.wait_all([torchs, call(echo, 1)]) == [7, 1]
    assert rpc.wait_all([call(echo, 1), torchs, of_the_other, child]) == [1, 7, 8, 2]
    assert rpc.wait_all([child, of_the_other]) == [2, 8]


def wait_for_all(to: str, count: int) -> Any:
    return rpc.wait_all([rpc.rpc_async(to, echo, (i,)) for i in range(count)])


async def wait_for_all_in_a_loop(to: str, count: int) -> Any:
    return wait_for_all(to, count)


def test_in_handlers_and_in_event_loops() -> None:
    for to in ("w0", "w1"):
        assert call(wait_for_all, to, 20).wait() == list(range(20))
        assert rpc.wait_all([call(wait_for_all, to, 5) for _ in range(20)]) == [list(range(5))] * 20
        assert call(wait_for_all_in_a_loop, to, 20).wait() == list(range(20))
        assert asyncio.run(wait_for_all_in_a_loop(to, 20)) == list(range(20))


def test_beside_other_threads(two: Cluster) -> None:
    w0 = two[0]

    def many(t: int) -> None:
        for i in range(20):
            futures = [w0.rpc_async("w1", echo, ((t, i, j),)) for j in range(10)]
            assert rpc.wait_all(futures) == [(t, i, j) for j in range(10)]
            assert w0.rpc_sync("w1", echo, (i,)) == i

    run_all([lambda t=t: many(t) for t in range(4)])  # type: ignore[misc]


# ---- who completes the futures


def test_the_thread_that_waits_reads_the_outcomes(in_thread: Any) -> None:
    read_by: list[Any] = []
    read = Local(lambda: read_by.append(threading.current_thread()))
    gate = Gate()
    values: list[Any] = []
    late = held(gate)
    others = [call(unpickled, read, gate) for _ in range(3)]
    thread = in_thread(lambda: values.extend(rpc.wait_all([late, *others])))
    until_it_collects(thread)
    gate.open()
    thread.join(10)
    assert values == [None] * 4
    assert read_by == [thread] * 3


def test_callbacks_may_wait_for_others_of_these_futures(in_thread: Any) -> None:
    gate, later = Gate(), Gate()
    first, second = held(gate, 1), held(later, 2)
    values: list[Any] = []
    seen: list[Any] = []

    def callback(_: object) -> None:
        later.open()
        seen.append(second.wait())

    first.add_done_callback(callback)
    thread = in_thread(lambda: values.extend(rpc.wait_all([first, second])))
    until_it_waits(thread)
    gate.open()
    thread.join(10)
    assert values == [1, 2]
    eventually(lambda: seen == [2])


def test_callbacks_may_wait_for_each_other(in_thread: Any) -> None:
    gate, meeting = Gate(), threading.Barrier(2)
    futures = [held(gate, i) for i in range(2)]
    met = [future.then(lambda _: meeting.wait(10) >= 0) for future in futures]
    values: list[Any] = []
    thread = in_thread(lambda: values.extend(rpc.wait_all(futures)))
    until_it_waits(thread)
    gate.open()
    thread.join(10)
    assert values == [0, 1]
    assert rpc.wait_all(met) == [True, True]


def test_threads_that_wait_for_the_same_futures(in_thread: Any) -> None:
    gate = Gate()
    futures = [held(gate, i) for i in range(3)]
    results: list[Any] = []
    collects = in_thread(lambda: results.append(rpc.wait_all(futures)))
    until_it_collects(collects)
    others: list[Callable[[], Any]] = [lambda: rpc.wait_all(futures), lambda: rpc.wait_all(futures[1:])]
    for function in (*others, futures[2].wait, futures[0].wait):
        in_thread(lambda function=function: results.append(function()))
    gate.open()
    eventually(lambda: len(results) == 5)
    assert sorted(map(str, results)) == ["0", "2", "[0, 1, 2]", "[0, 1, 2]", "[1, 2]"]


def test_a_future_that_another_thread_waits_for(in_thread: Any) -> None:
    gate = Gate()
    waited_for = held(gate, "waited for")
    result: list[Any] = []
    thread = in_thread(lambda: result.append(waited_for.wait()))
    eventually(lambda: thread.ident in sys._current_frames())
    gate.open()
    assert rpc.wait_all([call(echo, 1), waited_for]) == [1, "waited for"]
    thread.join(10)
    assert result == ["waited for"]


# ---- errors


def test_leaves_at_the_first_error() -> None:
    gate = Gate()
    late = held(gate, "late")
    with pytest.raises(ValueError, match="on purpose"):
        rpc.wait_all([late, call(), call(fail), late])
    assert not late.done()
    gate.open()
    assert late.wait() == "late"


def test_leaves_at_an_error_of_before() -> None:
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


def test_leaves_at_an_error_of_another_kind_of_future() -> None:
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


def test_leaves_at_an_error_that_another_thread_has_in_hand(in_thread: Any) -> None:
    """A thread of the pool is reading an outcome when this one begins to wait, and cannot."""
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
    until_it_collects(thread)
    reading.open()
    thread.join(10)
    assert not never.done()
    assert len(errors) == 1
    late.open()
    assert never.wait() == "late"


def test_what_another_thread_has_in_hand_is_waited_for(in_thread: Any) -> None:
    reading, late = Gate(), Gate()
    read = Local(lambda: reading.enter("read"))
    slow, other = call(unpickled, read), held(late, "late")
    reading.wait_for()
    values: list[Any] = []
    thread = in_thread(lambda: values.append(rpc.wait_all([other, slow])))
    until_it_collects(thread)
    late.open()
    eventually(other.done)
    assert not slow.done()
    reading.open()
    thread.join(10)
    assert values == [["late", "read"]]


def test_an_outcome_that_cannot_be_read(in_thread: Any) -> None:
    gate = Gate()
    read = Local(lambda: fail("cannot be read"))
    unreadable = call(unpickled, read, gate)
    gate.wait_for()

    def wait() -> None:
        with pytest.raises(ValueError, match="cannot be read"):
            rpc.wait_all([unreadable])

    thread = in_thread(wait)
    until_it_collects(thread)
    gate.open()
    thread.join(10)
    with pytest.raises(ValueError, match="cannot be read"):
        unreadable.value()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_while_an_outcome_is_read(in_thread: Any, kind: type[BaseException]) -> None:
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
    until_it_collects(thread)
    gate.open()
    thread.join(10)
    with pytest.raises(kind, match="while reading"):
        futures[0].wait()
    assert [f.wait() for f in futures[1:]] == [0, 1, 2]


def test_time_outs() -> None:
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
        until_it_collects(thread)
        closing = in_thread(lambda: group[1].shutdown(graceful=False))
        thread.join(10)
        for future in its:
            with pytest.raises(WorkerLost, match="w1"):
                future.wait()
        gate.open()
        closing.join(10)
    assert mine.wait() == "mine"


def test_a_worker_that_is_closed_meanwhile(in_thread: Any) -> None:
    """All of its futures end, also those that nobody waits for any more."""
    gate, ended = Gate(), threading.Semaphore(0)
    with cluster(2, graceful=False) as group:
        futures = [call(gate.enter, i) for i in range(3)]
        gate.wait_for(3)

        def wait() -> None:
            with pytest.raises(NotInitialized):
                rpc.wait_all(futures)

        thread = in_thread(wait)
        until_it_collects(thread)
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
    """What a signal's handler raises."""


def test_a_signal_ends_the_wait(on_signal: Any, in_thread: Any) -> None:
    def alarm(*_: object) -> None:
        raise Alarm

    gate = Gate()
    futures = [held(gate, i) for i in range(3)]
    on_signal(alarm)
    main = threading.main_thread()

    def send() -> None:
        until_it_collects(main)
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    in_thread(send)
    with pytest.raises(Alarm):
        rpc.wait_all(futures)
    gate.open()
    assert [f.wait() for f in futures] == [0, 1, 2]


def test_a_signal_while_a_future_is_being_ended(monkeypatch: pytest.MonkeyPatch, in_thread: Any) -> None:
    """Its outcome is nobody else's then, so it ends with what the handler raises."""
    gate = Gate()
    read = Local(echo)
    odd, other = call(unpickled, read, gate), held(gate, "other")
    gate.wait_for()
    interrupted = iter([True])
    end = waiting._end

    def interrupted_end(*given: Any) -> bool:
        if next(interrupted, False):
            raise Alarm
        return end(*given)

    monkeypatch.setattr(waiting, "_end", interrupted_end)
    main = threading.current_thread()

    def open_late() -> None:
        until_it_collects(main)
        gate.open()

    in_thread(open_late)
    with pytest.raises(Alarm):
        rpc.wait_all([odd, other])
    assert odd.done()
    with pytest.raises(Alarm):
        odd.wait()
    assert other.wait() == "other"


# ---- what is left over


def test_leaves_nothing_behind() -> None:
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

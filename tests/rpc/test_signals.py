"""Signal handlers that raise while the main thread waits for a call."""

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import rpc
from telegrad.streams.receiver import Receiver
from telegrad.streams.service import Streams
from telegrad.testing import Cluster, Gate, eventually

pytestmark = pytest.mark.usefixtures("clean")


class Alarm(Exception):
    """Exception that the signal handler raises."""


@pytest.fixture
def raise_once(two: Cluster) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Return a function that runs its argument in the main thread under a signal.

    Another thread is the leader. The signal arrives while the main thread waits for a call; the handler completes the
    call and raises once the reply has arrived.
    """

    def replies() -> int:
        return int(two[0]._worker.engine.stats()["replies"])

    before = signal.getsignal(signal.SIGUSR1)

    def attempt(begin: Callable[[Gate], Callable[[], Any]]) -> bool:
        """Return whether the reply arrived while the handler ran.

        It does only if another thread is the leader.
        """
        elsewhere, mine = Gate(), Gate()
        poller = threading.Thread(target=two[0].rpc_sync, args=("w1", elsewhere.enter))
        poller.start()
        elsewhere.wait_for()
        came = False

        def on_signal(*_: object) -> None:
            nonlocal came
            so_far = replies()
            mine.open()
            try:
                eventually(lambda: replies() > so_far, 1)
            except AssertionError:
                return
            came = True
            raise Alarm

        signal.signal(signal.SIGUSR1, on_signal)

        about_to_wait = threading.Event()  # not before the main thread expects what the handler raises

        def send_signal() -> None:
            mine.wait_for()
            about_to_wait.wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        sender = threading.Thread(target=send_signal)
        wait = begin(mine)
        sender.start()
        try:
            if reply_arrived(about_to_wait, wait):
                assert came
        finally:
            sender.join()
            elsewhere.open()
            poller.join()
        return came

    def reply_arrived(about_to_wait: threading.Event, wait: Callable[[], Any]) -> bool:
        try:
            about_to_wait.set()
            wait()
        except Alarm:
            return True
        return False

    def wait_until_replied(begin: Callable[[Gate], Callable[[], Any]]) -> None:
        assert any(attempt(begin) for _ in range(10)), "the main thread has always polled"

    yield wait_until_replied
    signal.signal(signal.SIGUSR1, before)


def test_the_reply_arrives_before_the_handler_raises(raise_once: Any) -> None:
    raise_once(lambda gate: lambda: rpc.rpc_sync("w1", gate.enter, (5,)))
    assert rpc.rpc_sync("w1", abs, (-1,)) == 1


def test_a_future_keeps_the_reply_that_arrives_before_the_handler_raises(raise_once: Any) -> None:
    futures = []

    def begin(gate: Gate) -> Any:
        futures.append(rpc.rpc_async("w1", gate.enter, (5,)))
        return futures[-1].wait

    raise_once(begin)
    eventually(futures[-1].done)
    assert [future.wait() for future in futures] == [5] * len(futures)


def test_references_in_an_abandoned_reply_are_released(raise_once: Any) -> None:
    raise_once(lambda gate: lambda: rpc.rpc_sync("w1", makes_a_reference, (gate,)))  # `clean` looks for it


def makes_a_reference(gate: Gate) -> Any:
    gate.enter()
    return rpc.RRef(5)


@pytest.fixture
def interrupted() -> Iterator[Callable[[Gate, Callable[[], object]], None]]:
    """Return a function that runs another one, and raises Alarm in it by a signal.

    The signal arrives once a handler has entered a gate. The kernel may deliver it to any thread.
    """

    def on_signal(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, on_signal)
    senders: list[threading.Thread] = []

    def send_when_entered(gate: Gate, to_main: bool) -> None:
        gate.wait_for()
        signal.pthread_kill((threading.main_thread().ident or 0) if to_main else threading.get_ident(), signal.SIGUSR1)

    def run(gate: Gate, function: Callable[[], object], to_main: bool = True) -> None:
        senders.append(threading.Thread(target=send_when_entered, args=(gate, to_main)))
        senders[-1].start()
        function()

    yield run
    for sender in senders:
        sender.join()
    signal.signal(signal.SIGUSR1, before)


class GateWithExits(Gate):
    """Gate that counts the handlers that have left it."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = 0

    def enter(self, value: object = None, timeout: float = 10.0) -> Any:
        try:
            return super().enter(value, timeout)
        finally:
            self.exits += 1


@pytest.mark.parametrize("to_main", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_map_raises_the_exception_of_a_signal_handler(interrupted: Any, ordered: bool, to_main: bool) -> None:
    gate = GateWithExits()
    with pytest.raises(Alarm):
        interrupted(gate, lambda: list(rpc.map("w1", gate.enter, range(4), chunk=1, ordered=ordered)), to_main)
    assert gate.exits == 0  # no completion has ended the wait
    gate.open()


ran: list[int] = []


class Handler:
    """Signal handler that is neither a function nor a method."""

    def __call__(self, *_: object) -> None:
        raise Alarm

    def method(self, *_: object) -> None:
        raise Alarm


@pytest.mark.parametrize("handler", [Handler(), Handler().method, functools.partial(Handler().method)])
def test_map_runs_no_item_twice_if_a_signal_handler_raises_while_it_sends(
    two: Cluster, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = two[0]._worker.calls
    client = calls.client

    def interrupted(*args: Any) -> Any:
        client.start(*args)
        signal.raise_signal(signal.SIGUSR1)

    ran.clear()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "client", SimpleNamespace(start=interrupted))
            with pytest.raises(Alarm):
                list(rpc.map("w1", ran_on_worker, range(8), chunk=8))
    finally:
        signal.signal(signal.SIGUSR1, before)
    eventually(lambda: len(ran) >= 8 and not two[1].debug_info().requests)
    assert sorted(ran) == list(range(8))


def ran_on_worker(item: int) -> None:
    ran.append(item)


def poll(gate: Gate) -> None:
    gate.entered.release()
    eventually(rpc.cancelled)
    gate.entered.release()


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


def with_then(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call).then(lambda done: done.value())


@pytest.mark.parametrize("interceptor", [through, with_then])
def test_an_interrupted_call_behind_interceptors_is_canceled(interrupted: Any, interceptor: Any) -> None:
    gate = Gate()
    with rpc.intercept(client=interceptor), pytest.raises(Alarm):
        interrupted(gate, lambda: rpc.rpc_sync("w1", poll, (gate,), timeout=0))
    gate.wait_for()  # the handler has seen the cancellation


def signals_with_each_item(count: int) -> Iterator[int]:
    for item in range(count):
        signal.raise_signal(signal.SIGUSR1)  # in this thread, so that it does not end the wait of the main thread
        yield item


def test_a_signal_that_comes_with_an_item_is_raised_by_the_reader(two: Cluster) -> None:
    def on_signal(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        for _ in range(50):
            with pytest.raises(Alarm), rpc.stream("w1", signals_with_each_item, (1,), timeout=30) as items:
                list(items)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_while_items_arrive_ends_the_stream(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise there."""

    def accept(*_: object) -> None:
        raise Alarm

    monkeypatch.setattr(Receiver, "_accept", accept)
    items = rpc.stream("w1", signals_with_each_item, (0,), timeout=30)
    with pytest.raises(Alarm):
        list(items)
    assert Streams.of(two[0]._worker).left() == {"streams read by other workers": 0, "streams not closed": 0}


def waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "_drive":
        frame = frame.f_back
    return frame is not None


def test_a_signal_ends_the_second_wait_for_a_call(two: Cluster) -> None:
    def on_signal(*_: object) -> None:
        raise Alarm

    def send_signal() -> None:
        eventually(lambda: waits(threading.main_thread()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    gate, before = Gate(), signal.signal(signal.SIGUSR1, on_signal)
    future = rpc.rpc_async("w1", gate.enter, (5,))
    gate.wait_for()
    first, sender = threading.Thread(target=future.wait), threading.Thread(target=send_signal)
    first.start()
    eventually(lambda: waits(first))
    sender.start()
    try:
        with pytest.raises(Alarm):
            future.wait()
        assert not future.done()
    finally:
        gate.open()
        first.join()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert future.wait() == 5

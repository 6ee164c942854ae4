"""Multicasts within interceptors: a refused call affects only its own future."""

import signal
import threading

import pytest
from test_interrupted_sends import Alarm, Timer

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.testing import Cluster, eventually

pytestmark = pytest.mark.usefixtures("no_interceptors_left", "clean")


def until_canceled() -> None:
    eventually(rpc.cancelled)


def refuse_w1(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    if call.peer == "w1":
        raise PermissionError("not for w1")
    return proceed(call)


def test_an_interceptor_that_refuses_one_worker_affects_no_other() -> None:
    with rpc.intercept(client=refuse_w1):
        first, refused, last = rpc.multicast(("w0", "w1", "w0"), abs, (-1,))
        (alone,) = rpc.multicast(("w1",), abs, (-1,))
    assert (first.wait(), last.wait()) == (1, 1)
    for future in (refused, alone):
        with pytest.raises(PermissionError, match="not for w1"):
            future.wait()


def test_arguments_that_cannot_be_sent_raise_with_interceptors() -> None:
    def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        return proceed(call)

    with rpc.intercept(client=through), pytest.raises(SerializationError, match="pickle"):
        rpc.multicast(("w0", "w1"), abs, (threading.Lock(),))


@pytest.mark.parametrize("kind", [Alarm, Timer])
def test_an_interceptor_that_a_signal_handler_interrupts_leaves_no_calls(
    two: Cluster, kind: type[BaseException]
) -> None:
    def on_signal(*_: object) -> None:
        raise kind

    def interrupt_w1(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        if call.peer == "w1":
            signal.raise_signal(signal.SIGUSR1)
        return proceed(call)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with rpc.intercept(client=interrupt_w1), pytest.raises(kind):
            rpc.multicast(("w0", "w1"), until_canceled, timeout=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    engine = two[0]._worker.engine
    eventually(lambda: not engine.stats()["pending_calls"])

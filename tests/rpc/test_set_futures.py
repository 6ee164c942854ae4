"""Futures of calls that the program completes."""

import asyncio
import time
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc import InterceptedCall, Proceed
from telegrad.testing import Cluster, Gate, eventually, run_all

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.open()


def entered(gate: Gate) -> Any:
    future = rpc.rpc_async("w1", gate.enter, ("late",))
    gate.wait_for()
    return future


def proceed(call: InterceptedCall, further: Proceed) -> object:
    return further(call).then(lambda done: done.value())


def in_a_loop(future: Any) -> Any:
    async def main() -> Any:
        return await future

    return asyncio.run(main())


WAITS = {
    "wait": lambda future: future.wait(),
    "wait_all": lambda future: rpc.wait_all([future])[0],
    "await": in_a_loop,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("fails", [False, True], ids=["value", "error"])
@pytest.mark.parametrize("retry", [None, rpc.Retry()], ids=["call", "retry"])
def test_every_waiter_gets_what_the_program_sets(gate: Gate, wait: Any, fails: bool, retry: Any) -> None:
    future = rpc.rpc_async("w1", gate.enter, ("late",), retry=retry)
    gate.wait_for()

    def set_late() -> None:
        time.sleep(0.1)  # until the other thread waits
        if fails:
            future.set_exception(KeyError("mine"))
        else:
            future.set_result("mine")

    def read() -> object:
        try:
            return wait(future)
        except KeyError as e:
            return e

    result, _ = run_all([read, set_late])
    assert repr(result) == ("KeyError('mine')" if fails else "'mine'")
    assert (type(future.failure()) is KeyError) == fails


steps: list[str] = []


def until_canceled() -> None:
    steps.append("started")
    eventually(rpc.cancelled)
    steps.append("canceled")


def test_the_call_is_canceled(two: Cluster) -> None:
    steps.clear()
    future = rpc.rpc_async("w1", until_canceled)
    eventually(lambda: steps == ["started"])
    future.set_result(None)
    assert not future.cancelled()
    eventually(lambda: steps == ["started", "canceled"])


def test_an_intercepted_call_is_canceled(gate: Gate) -> None:
    with rpc.intercept(client=proceed):
        future = entered(gate)
        future.set_result("mine")
        assert future.wait() == "mine"


@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_a_late_reply_logs_nothing(gate: Gate, caplog: pytest.LogCaptureFixture, error: Any) -> None:
    future = entered(gate)
    future._mark_read()
    if error is None:
        future.set_result("mine")
    else:
        future.set_exception(error)
    gate.open()
    assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert caplog.messages == []


pending: list[Any] = []


def set_pending() -> str:
    pending[0].set_result("mine")
    return "late"


class SetsWhenRead:
    """Result that completes the future of its call when it is unpickled."""

    def __reduce__(self) -> Any:
        return set_pending, ()


def waits_for(gate: Gate) -> SetsWhenRead:
    gate.enter()
    return SetsWhenRead()


def test_a_reply_that_is_being_processed_is_dropped(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    pending[:] = [rpc.rpc_async("w1", waits_for, (gate,))]
    gate.wait_for()
    gate.open()
    eventually(pending[0].done)  # a pool thread processes the reply
    assert pending.pop().wait() == "mine"
    assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert caplog.messages == []


def test_a_future_that_is_done_is_not_set(two: Cluster) -> None:
    future = rpc.rpc_async("w1", max, (1, 2))
    assert future.wait() == 2
    for complete in (future.set_result, lambda _: future.set_exception(ValueError())):
        with pytest.raises(RuntimeError, match="completed Future"):
            complete(3)
    assert (future.wait(), future.failure()) == (2, None)


def test_setting_the_future_of_then_leaves_the_call(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    future = entered(gate)
    child = future.then(lambda done: done.value())
    child.set_result("mine")
    assert child.wait() == "mine"
    gate.open()
    assert future.wait() == "late"
    assert caplog.messages == []

"""`telegrad.testing`: waiting for events, local objects, concurrent functions."""

import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from telegrad import rpc
from telegrad.testing import Cluster, Gate, Local, eventually, run_all

SHORT = 0.05  # s; limit of waits that time out
LONG = 20.0  # s; what takes nearly as long has hung


@pytest.fixture
def stuck() -> Any:
    """Start a thread that waits in a function visible in stacks."""
    leave, here = threading.Event(), threading.Event()

    def wait_where_it_is_seen() -> None:
        here.set()
        leave.wait(LONG)

    thread = threading.Thread(target=wait_where_it_is_seen, name="the-stuck-one")
    thread.start()
    assert here.wait(LONG)
    yield thread
    leave.set()
    thread.join()


def assert_shows(text: str, *parts: str) -> None:
    assert not [part for part in parts if part not in text], text


# ---- eventually


def test_a_true_condition_is_evaluated_once() -> None:
    asked: list[int] = []
    eventually(lambda: not asked.append(1), 0.0)
    assert asked == [1]


def test_the_condition_is_evaluated_until_true() -> None:
    answers = iter([False, None, 0, "", "yes"])
    eventually(lambda: next(answers))
    assert not list(answers)


def test_changes_of_another_thread_are_seen() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=seen.append, args=(1,))
    thread.start()
    eventually(lambda: seen, LONG)
    thread.join()


def test_the_timeout_shows_every_thread(stuck: threading.Thread) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        eventually(lambda: False, SHORT, "the impossible")
    assert SHORT <= time.monotonic() - start < LONG
    assert_shows(
        str(caught.value), f"waited {SHORT:g} s without success for the impossible",
        "the-stuck-one", "wait_where_it_is_seen",
        "MainThread", "test_the_timeout_shows_every_thread",
    )  # fmt: skip


def never_true() -> bool:
    return False


def test_the_timeout_names_the_condition() -> None:
    with pytest.raises(AssertionError, match="without success for <function never_true"):
        eventually(never_true, 0.0)


def test_errors_of_the_condition_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0)


# ---- Local


def same(a: Local[Any], b: Any) -> bool:
    return a.value is b.value


def give_back(local: Local[Any]) -> Local[Any]:
    return local


def test_local_objects_keep_their_identity(two: Cluster) -> None:
    unpicklable = threading.Lock()
    local = Local(unpicklable)
    assert rpc.rpc_sync("w1", same, (local, local))
    assert rpc.rpc_sync("w1", give_back, (local,)) is local
    assert rpc.rpc_sync("w1", give_back, (local,)).value is unpicklable


def test_local_objects_are_distinct() -> None:
    first, second = Local(1), Local(2)
    assert [pickle.loads(pickle.dumps(local)).value for local in (second, first)] == [2, 1]


def test_local_object_that_was_freed() -> None:
    data = pickle.dumps(Local(object()))
    gc.collect()
    with pytest.raises(LookupError, match="was not kept alive"):
        pickle.loads(data)


# ---- Gate


def test_gate_holds_a_handler_until_it_is_opened(two: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("w1", gate.enter, ("through",))
    gate.wait_for(timeout=LONG)
    assert not future.done()
    assert not gate.is_open()
    gate.open()
    assert gate.is_open()
    assert future.wait() == "through"
    assert rpc.rpc_sync("w1", gate.enter) is None, "it stays open"


def test_gate_counts_its_waiting_handlers(two: Cluster) -> None:
    gate = Gate()
    futures = [rpc.rpc_async(to, gate.enter, (to,)) for to in ("w0", "w1", "w1")]
    gate.wait_for(3, LONG)
    assert not gate.entered.acquire(blocking=False), "they have been waited for"
    gate.open()
    assert [future.wait() for future in futures] == ["w0", "w1", "w1"]


def test_gate_that_is_never_opened() -> None:
    with pytest.raises(TimeoutError, match="was not opened in time"):
        Gate().enter(timeout=SHORT)


def test_gate_that_is_never_entered(stuck: threading.Thread) -> None:
    gate = Gate()
    gate.entered.release()
    with pytest.raises(AssertionError) as caught:
        gate.wait_for(2, SHORT)
    assert_shows(str(caught.value), "1 of 2 arrived at the gate", "wait_where_it_is_seen")


# ---- run_all


def test_runs_at_the_same_time_and_keeps_the_order() -> None:
    meeting = threading.Barrier(3, timeout=LONG)

    def meet(number: int) -> Callable[[], int]:
        def run() -> int:
            meeting.wait()
            return number

        return run

    assert run_all([meet(number) for number in range(3)]) == [0, 1, 2]
    assert run_all([]) == []


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    second_failed = threading.Event()
    ended: list[str] = []

    def first() -> None:
        assert second_failed.wait(LONG)
        raise KeyError("first")

    def second() -> None:
        second_failed.set()
        raise ValueError("second")

    def third() -> None:
        assert second_failed.wait(LONG)
        ended.append("third")

    with pytest.raises(KeyError, match="first"):
        run_all([first, second, third])
    assert ended == ["third"]


def test_exits_are_raised() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_all([leave])


def test_functions_that_do_not_end_are_shown() -> None:
    gate = Gate()

    def hang_here() -> None:
        gate.enter(timeout=LONG)

    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_all([lambda: None, hang_here, hang_here], SHORT)
    assert time.monotonic() - start < LONG
    assert_shows(str(caught.value), f"run-all-1, run-all-2 did not end within {SHORT:g} s", "hang_here")
    gate.open()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("run-all-")], LONG)

"""`wait_all`: the waiting thread decodes the completions of many calls."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waiting_helpers import call, echo, held, unpickled, wait_until_in_core, wait_until_in_wait_all

from telegrad import _core, rpc
from telegrad.testing import Cluster, Gate, Local, eventually, run_all

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.filterwarnings("error")]


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
    assert rpc.wait_all([twice, twice]) == ["twice", "twice"]  # it is complete
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
        assert asyncio.run(wait_for_all_in_a_loop(to, 20)) == list(range(20))


def test_alongside_other_threads(two: Cluster) -> None:
    w0 = two[0]

    def many(t: int) -> None:
        for i in range(20):
            futures = [w0.rpc_async("w1", echo, ((t, i, j),)) for j in range(10)]
            assert rpc.wait_all(futures) == [(t, i, j) for j in range(10)]
            assert w0.rpc_sync("w1", echo, (i,)) == i

    run_all([lambda t=t: many(t) for t in range(4)])  # type: ignore[misc]


# ---- the thread that completes the futures


def test_the_waiting_thread_decodes_the_completions(in_thread: Any) -> None:
    read_by: list[Any] = []
    read = Local(lambda: read_by.append(threading.current_thread()))
    gate = Gate()
    values: list[Any] = []
    late = held(gate)
    others = [call(unpickled, read, gate) for _ in range(3)]
    thread = in_thread(lambda: values.extend(rpc.wait_all([late, *others])))
    wait_until_in_core(thread)
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
    wait_until_in_wait_all(thread)
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
    wait_until_in_wait_all(thread)
    gate.open()
    thread.join(10)
    assert values == [0, 1]
    assert rpc.wait_all(met) == [True, True]


def test_threads_that_wait_for_the_same_futures(in_thread: Any) -> None:
    gate = Gate()
    futures = [held(gate, i) for i in range(3)]
    results: list[Any] = []
    collects = in_thread(lambda: results.append(rpc.wait_all(futures)))
    wait_until_in_core(collects)
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
    eventually(lambda: thread.ident in _core.thread_frames())
    gate.open()
    assert rpc.wait_all([call(echo, 1), waited_for]) == [1, "waited for"]
    thread.join(10)
    assert result == ["waited for"]

"""Errors and lost workers in `rpc.map`."""

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from map_helpers import identity, invert, mapping, notes
from retry_helpers import FAST, TCP, break_connections

from telegrad import rpc
from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, SerializationError, UnknownWorker, WorkerLost
from telegrad.testing import Cluster, Gate, assert_quiescent, cluster, eventually

RETRY = rpc.Retry(attempts=2)

pytestmark = [pytest.mark.usefixtures("clean")]


@pytest.mark.parametrize("chunk", [1, 3, 100, None])
def test_an_error_comes_at_its_place(chunk: int | None) -> None:
    results = rpc.map("w1", invert, [5, 4, 2, 1, 0, 3], chunk=chunk)
    assert [next(results) for _ in range(4)] == [0.2, 0.25, 0.5, 1.0]
    with pytest.raises(ZeroDivisionError) as raised:
        next(results)
    assert isinstance(raised.value, RemoteError)
    assert notes(raised.value).endswith("in rpc.map of invert, at item 4")
    assert "return 1 / x" in str(raised.value.__cause__)
    assert list(results) == []


def stop_at(x: int) -> int:
    if x == 3:
        raise StopIteration(x)
    return x


def test_stop_iteration_is_an_error() -> None:
    results = rpc.map("w1", stop_at, range(6))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RemoteError, match=r"stop_at raised .*StopIteration") as raised:
        next(results)
    assert notes(raised.value).endswith("in rpc.map of stop_at, at item 3")
    assert (raised.value.worker, raised.value.original_type) == ("w1", "StopIteration")
    assert isinstance(raised.value.__cause__, StopIteration)


def test_an_error_drops_the_remaining_items(chunk_sizes: list[int]) -> None:
    items = itertools.count(-2)
    with pytest.raises(ZeroDivisionError):
        list(rpc.map("w1", invert, items, chunk=1))
    assert next(items) <= 4
    eventually(lambda: len(chunk_sizes) <= 5)


def test_the_callee_logs_the_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "telegrad.remote"), pytest.raises(ZeroDivisionError):
        list(rpc.map("w1", invert, [0]))
    (record,) = [r for r in caplog.records if r.name == "telegrad.remote"]
    assert "a call from w0 raised ZeroDivisionError" in record.getMessage()


def exit_at(x: int) -> int:
    if x == 2:
        sys.exit(3)
    return x


def test_exits_end_neither_worker() -> None:
    results = rpc.map("w1", exit_at, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(RemoteError, match="SystemExit"):
        next(results)


def test_an_error_of_the_items() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("no more")

    for ordered in (True, False):
        results = rpc.map("w1", identity, items(), chunk=2, ordered=ordered)
        assert sorted(next(results) for _ in range(5)) == list(range(5))
        with pytest.raises(KeyError, match="no more") as raised:
            next(results)
        assert not isinstance(raised.value, RemoteError)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_an_item_that_cannot_be_sent(chunk: int) -> None:
    items: list[Any] = [*range(5), threading.Lock(), *range(10)]
    results = rpc.map("w1", identity, items, chunk=chunk)
    assert [next(results) for _ in range(5)] == list(range(5))
    with pytest.raises(SerializationError, match="lock") as raised:
        next(results)
    assert "at item 5" in notes(raised.value)
    assert list(results) == []


class Unreducible:
    """Value whose own code fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise LookupError("no parts")


@pytest.mark.parametrize("chunk", [1, 10])
def test_errors_of_code_that_runs_at_the_sender_come_at_their_place(chunk: int) -> None:
    results = rpc.map("w1", identity, [*range(5), Unreducible(), 6], chunk=chunk)
    assert [next(results) for _ in range(5)] == list(range(5))
    with pytest.raises(LookupError, match="no parts") as raised:
        next(results)
    assert notes(raised.value).endswith("at item 5")

    calls = itertools.count()

    def refuse_the_third(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
        if next(calls) == 2:
            raise PermissionError("no more")
        return proceed(call)

    with rpc.intercept(client=refuse_the_third):
        results = rpc.map("w1", identity, range(10), chunk=1)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(PermissionError, match="no more"):
            next(results)


failures = itertools.count()


def fail_at_first(x: int) -> int:
    if x == 3 and next(failures) % 3 < 2:
        raise ConnectionError("try again")
    return x


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 10])
def test_errors_of_the_function_that_the_retry_covers(chunk: int, ordered: bool) -> None:
    retry = rpc.Retry(attempts=3, backoff=0.001, on=(ConnectionError,))
    results = rpc.map("w1", fail_at_first, range(6), chunk=chunk, ordered=ordered, retry=retry)
    assert sorted(results) == list(range(6))
    results = rpc.map("w1", fail_at_first, range(6), chunk=chunk, retry=rpc.Retry(attempts=2, on=(ConnectionError,)))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConnectionError, match="try again") as raised:
        next(results)
    assert notes(raised.value).endswith("at item 3")
    next(failures)  # the next case begins with two failures


def never_succeed(x: int) -> int:
    if x == 1:
        raise ConnectionError("down")
    return x


def test_the_pause_of_a_retry_does_not_count_towards_the_timeout() -> None:
    retry = rpc.Retry(attempts=2, backoff=0.3, jitter=False, on=(ConnectionError,))
    results = rpc.map("w1", never_succeed, range(3), chunk=3, timeout=0.2, retry=retry)
    assert next(results) == 0
    with pytest.raises(ConnectionError, match="down"):
        next(results)


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(SerializationError, match="lock") as raised:
        list(rpc.map("w1", lambda _: threading.Lock(), range(3), chunk=3))
    assert "at items 0 to 2" in notes(raised.value)


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize("retry", [None, RETRY])
def test_a_timeout(intercepted: bool, retry: rpc.Retry | None) -> None:
    gate = Gate()
    with rpc.intercept(client=through) if intercepted else contextlib.nullcontext():
        results = rpc.map("w1", gate.enter, range(3), chunk=2, timeout=0.05, retry=retry)
        with pytest.raises(RpcTimeout) as raised:
            next(results)
    call = "Gate.enter (a chunk of rpc.map with 2 items) on w1"
    assert raised.value.call == call
    assert f"({call}; running)" in str(raised.value)
    assert "at items 0 to 1" in notes(raised.value)
    gate.open()


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        rpc.map([], identity, [1])
    for name, value in (("chunk", 0), ("chunk", -1), ("chunk", 1.5), ("in_flight", 0)):
        with pytest.raises(ValueError, match=f"{name} of rpc.map has to be an integer of at least .,? and is {value}"):
            rpc.map("w1", identity, [1], **{name: value})
    with pytest.raises(TypeError, match=r"retry has to be a telegrad\.rpc\.Retry"):
        rpc.map("w1", identity, [1], retry=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="callable"):
        rpc.map("w1", None, [1])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="not iterable"):
        rpc.map("w1", identity, 1)  # type: ignore[call-overload]
    with pytest.raises(UnknownWorker, match="w7"):
        rpc.map(["w1", "w7"], identity, [1])


def test_in_an_event_loop() -> None:
    async def handler() -> list[int]:
        return list(rpc.map("w0", identity, [1]))

    with pytest.raises(RuntimeError, match=r"next\(\) of rpc.map would block the event loop of worker 'w1'"):
        rpc.rpc_sync("w1", handler)


def test_without_a_group() -> None:
    with cluster(1, names="x{}", current=None) as group:
        with group[0]:
            results = rpc.map("x0", identity, range(10), chunk=1)
            assert next(results) == 0
        group[0].shutdown(graceful=False)
        with pytest.raises((NotInitialized, WorkerLost)):
            list(results)
        with group[0], pytest.raises(NotInitialized):
            rpc.map("x0", identity, [1])


# ---- lost workers


def lose(group: Cluster, rank: int) -> None:
    group.workers.pop(rank).shutdown(graceful=False)


@pytest.fixture
def three() -> Iterator[Cluster]:
    with cluster(3, names="v{}", graceful=False) as group:
        yield group
        assert_quiescent(group[0])


@pytest.mark.parametrize("ordered", [True, False])
def test_with_retry_other_workers_run_the_chunks_of_a_lost_one(three: Cluster, ordered: bool) -> None:
    gate = Gate()

    def stay(x: int, gate: Gate = gate) -> int:
        if rpc.get_worker_info().name == "v1":
            gate.enter()
        return x

    results = rpc.map(["v1", "v2"], stay, range(40), chunk=2, ordered=ordered, retry=RETRY)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(results))
    thread.start()
    gate.wait_for(2)
    lost = threading.Thread(target=lambda: lose(three, 1))
    lost.start()
    thread.join(10)
    gate.open()
    lost.join(10)
    assert sorted(got) == list(range(40))
    if ordered:
        assert got == list(range(40))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_chunk_that_is_lost_just_after_the_check_is_sent_again(
    three: Cluster, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    settle = mapping._Mapping._settle
    lost = threading.Thread(target=lambda: lose(three, 1))

    def stay(x: int, gate: Gate = gate) -> int:
        return gate.enter(x) if rpc.get_worker_info().name == "v1" else x

    def settle_and_lose(self: Any) -> None:
        settle(self)
        if self._pending and lost.ident is None:
            gate.wait_for(1)
            lost.start()
            eventually(lambda: self._pending[0].future.done())

    monkeypatch.setattr(mapping._Mapping, "_settle", settle_and_lose)
    assert list(rpc.map(["v1", "v2"], stay, range(2), chunk=2, ordered=ordered, retry=RETRY)) == [0, 1]
    gate.open()
    lost.join(10)


def test_without_retry_the_loss_is_raised(three: Cluster) -> None:
    gate = Gate()

    def stay(x: int, gate: Gate = gate) -> int:
        return gate.enter(x) if x > 2 else x

    results = rpc.map("v1", stay, range(10), chunk=1)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    gate.wait_for(1)
    lost = threading.Thread(target=lambda: lose(three, 1))
    lost.start()
    with pytest.raises(WorkerLost, match="v1") as raised:
        next(results)
    gate.open()
    lost.join(10)
    assert "at item 3" in notes(raised.value)


def test_if_all_workers_are_lost_the_loss_is_raised(three: Cluster) -> None:
    lose(three, 2)
    lose(three, 1)
    with pytest.raises(WorkerLost):
        list(rpc.map(["v1", "v2"], identity, range(10), retry=rpc.Retry(5, 0.001, 0.01)))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_worker_that_comes_back_runs_its_chunks_and_the_rest(ordered: bool) -> None:
    with cluster(2, TCP, names="u{}") as group:
        gate = Gate()

        def stay(x: int, gate: Gate = gate) -> int:
            return gate.enter(x) if x == 3 else x

        results = rpc.map("u1", stay, range(20), chunk=1, ordered=ordered, retry=FAST)
        got = [next(results) for _ in range(3)]
        gate.wait_for(1)
        assert break_connections()
        gate.open()
        got += results
        assert sorted(got) == list(range(20))
        assert group[0].debug_info().retries == ()

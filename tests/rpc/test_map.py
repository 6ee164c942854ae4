"""`rpc.map`: many small calls, without a future each."""

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, SerializationError, UnknownWorker, WorkerLost
from telegrad.rpc import chunks
from telegrad.rpc.functions import async_execution
from telegrad.testing import Cluster, Gate, Local, assert_quiescent, cluster, eventually

pytestmark = [pytest.mark.usefixtures("clean")]
mapping = sys.modules["telegrad.rpc.map"]


def identity(x: Any) -> Any:
    return x


def me(_: object) -> str:
    return rpc.get_worker_info().name


def invert(x: int) -> float:
    return 1 / x


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.fixture
def chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of items of the chunks that arrive."""
    sizes: list[int] = []
    original = chunks.run_chunk

    def run_chunk(function: Any, items: list[Any], caller: int) -> Any:
        sizes.append(len(items))
        return original(function, items, caller)

    run_chunk.__module__, run_chunk.__qualname__ = chunks.__name__, "run_chunk"
    monkeypatch.setattr(chunks, "run_chunk", run_chunk)
    monkeypatch.setattr(mapping, "run_chunk", run_chunk)
    return sizes


# ---- results


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("workers", ["w1", 1, ["w1"], ["w0", "w1"], ("w1", 1, "w1")], ids=str)
def test_results_are_those_of_single_calls(workers: Any, ordered: bool) -> None:
    got = list(rpc.map(workers, identity, range(1000), ordered=ordered))
    assert sorted(got) == list(range(1000))
    if ordered:
        assert got == list(range(1000))


def test_a_worker_info_is_a_worker() -> None:
    assert list(rpc.map(rpc.get_worker_info("w1"), me, range(2))) == ["w1", "w1"]


def test_no_items() -> None:
    assert list(rpc.map("w1", identity, [])) == []


def test_several_workers_share_the_items() -> None:
    gates = {"w0": Gate(), "w1": Gate()}

    def enter(_: int, gates: dict[str, Gate] = gates) -> str:
        name = rpc.get_worker_info().name
        gates[name].enter()
        return name

    results = rpc.map(["w0", "w1"], enter, range(4), chunk=1, in_flight=2)
    first = threading.Thread(target=lambda: got.extend(results))
    got: list[str] = []
    first.start()
    for gate in gates.values():
        gate.wait_for(2)
        gate.open()
    first.join(10)
    assert sorted(got) == ["w0", "w0", "w1", "w1"]


@pytest.mark.parametrize(
    "function", [lambda x: x + 1, (1).__add__, rpc.functions.async_execution(lambda x: done(x + 1))], ids=str
)
def test_functions_without_a_name(function: Any) -> None:
    assert list(rpc.map("w1", function, range(20))) == list(range(1, 21))


def test_tensors_and_other_values() -> None:
    items: list[Any] = [torch.full((n,), float(n)) for n in range(1, 30)]
    got = list(rpc.map("w1", torch.neg, items))
    assert all(torch.equal(a, -b) for a, b in zip(got, items, strict=True))
    values = [{"a": [1, "b"]}, None, b"x", {1, 2}, complex(1, 2), range(3)]
    assert list(rpc.map("w1", identity, values)) == values


def test_torch_operators_report_wrong_arguments_as_in_calls() -> None:
    with pytest.raises(RuntimeError, match="aten::neg"):
        list(rpc.map("w1", torch.neg, ["text"]))


# ---- deferred results


async def later(x: int) -> int:
    await asyncio.sleep(0)
    if x == 7:
        raise KeyError(x)
    return x + 1


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@async_execution
def nested(x: int) -> Any:
    return rpc.rpc_async("w0", identity, (x,)).then(lambda got: got.value() + 1)


@async_execution
def of_torch(x: int) -> Any:
    return done(x + 1)


@async_execution
def no_future(x: int) -> Any:
    return x if x == 3 else done(x)


@pytest.mark.parametrize("function", [later, nested, of_torch])
def test_deferred_results_are_awaited(function: Any) -> None:
    assert list(rpc.map("w1", function, range(8, 300))) == list(range(9, 301))


meeting: dict[str, Any] = {}


async def meet(x: int) -> int:
    """Return when all items of the chunk are here."""
    waiting = meeting.setdefault("waiting", [])
    waiting.append(asyncio.get_running_loop().create_future())
    if len(waiting) == 5:
        for future in waiting:
            future.set_result(None)
    await waiting[x]
    return x


def test_coroutines_of_a_chunk_run_at_once() -> None:
    assert list(rpc.map("w1", meet, range(5), chunk=5, timeout=10)) == list(range(5))
    meeting.clear()


async def grad_mode(_: int) -> bool:
    before = torch.is_grad_enabled()
    await asyncio.sleep(0)
    return before or torch.is_grad_enabled()


def test_coroutines_have_the_callers_torch_state() -> None:
    with torch.no_grad():
        assert list(rpc.map("w1", grad_mode, range(5), chunk=5)) == [False] * 5
    assert list(rpc.map("w1", grad_mode, range(5), chunk=5)) == [True] * 5


def test_the_first_error_of_deferred_results() -> None:
    results = rpc.map("w1", later, range(10), chunk=10)
    assert list(itertools.islice(results, 7)) == list(range(1, 8))
    with pytest.raises(KeyError) as raised:
        next(results)
    assert isinstance(raised.value, RemoteError)
    assert "of later, at item 7" in notes(raised.value)


def test_a_result_that_is_no_future() -> None:
    results = rpc.map("w1", no_future, range(5), chunk=5)
    assert list(itertools.islice(results, 3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object, but got builtins\.int"):
        next(results)


# ---- chunks and back-pressure


def test_chunks_grow_while_items_are_cheap(chunk_sizes: list[int]) -> None:
    assert list(rpc.map("w1", identity, range(20_000))) == list(range(20_000))
    assert chunk_sizes[0] == 1
    assert all(b <= mapping.GROWTH * a for a, b in itertools.pairwise(chunk_sizes[:3]))
    assert max(chunk_sizes) > 100
    assert sum(chunk_sizes) == 20_000


def test_size_by_duration() -> None:
    callee = mapping._Callee(rpc.get_worker_info("w1"))
    callee.adapt(([0] * 10, 10, None))
    assert callee.size == 10 * mapping.GROWTH
    callee.adapt(([0] * 10, 10 * mapping.CHUNK_TIME, None))
    assert callee.size == 1
    callee.adapt(([0] * 10, mapping.CHUNK_TIME // 2, None))
    assert callee.size == 20
    callee.adapt(([0] * mapping.MOST_ITEMS, 1, None))
    assert callee.size == mapping.MOST_ITEMS
    callee.adapt(([0] * 1000, None, None))
    assert callee.size == mapping.MOST_DEFERRED
    callee.adapt(([torch.empty(mapping.CHUNK_BYTES // 8)] * 100, 1, None))
    assert callee.size == 2
    callee.adapt(([], 1, b"error"))
    assert callee.size == 2


@pytest.mark.parametrize(
    "make", [torch.empty, lambda n: bytes(4 * n), lambda n: [torch.empty(n)], lambda n: {1: "x" * 4 * n}]
)
def test_chunks_are_bounded_by_bytes(make: Any) -> None:
    source = mapping._Source(make(mapping.CHUNK_BYTES // 16) for _ in range(9))
    assert [len(source.take(6, mapping.CHUNK_BYTES)) for _ in range(4)] == [4, 4, 1, 0]
    assert source.taken == 9


def test_a_given_chunk(chunk_sizes: list[int]) -> None:
    assert list(rpc.map("w1", identity, range(25), chunk=10)) == list(range(25))
    assert sorted(chunk_sizes) == [5, 10, 10]


@pytest.mark.parametrize("ordered", [True, False])
def test_items_are_taken_as_results_are_used(ordered: bool) -> None:
    counted = itertools.count()
    results = rpc.map("w1", identity, counted, chunk=3, in_flight=2, ordered=ordered)
    for number in range(50):
        next(results)
        assert next(counted) <= 3 * (2 + number // 3 + 1) + number + 1
    results.close()


def test_each_worker_has_the_chunks_in_flight(chunk_sizes: list[int]) -> None:
    gate = Gate()
    results = rpc.map("w1", gate.enter, range(10), chunk=1, in_flight=3)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(results))
    thread.start()
    gate.wait_for(3)
    assert len(chunk_sizes) == 3
    gate.open()
    thread.join(10)
    assert got == list(range(10))


def test_unordered_results_come_as_completed() -> None:
    gate = Gate()

    def slow_first(x: int, gate: Gate = gate) -> int:
        if x == 0:
            gate.enter()
        return x

    results = rpc.map("w1", slow_first, range(5), chunk=1, in_flight=2, ordered=False)
    assert [next(results) for _ in range(4)] == [1, 2, 3, 4]
    gate.open()
    assert list(results) == [0]


def test_closing_early_drops_the_rest(chunk_sizes: list[int]) -> None:
    results = rpc.map("w1", identity, itertools.count(), chunk=10)
    assert next(results) == 0
    results.close()
    assert list(rpc.map("w1", identity, range(5), chunk=1)) == list(range(5))
    assert chunk_sizes.count(10) <= 3  # chunks in flight are canceled, and may not run
    assert list(results) == []


# ---- errors


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


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(SerializationError, match="lock") as raised:
        list(rpc.map("w1", lambda _: threading.Lock(), range(3), chunk=3))
    assert "at items 0 to 2" in notes(raised.value)


def test_a_timeout() -> None:
    gate = Gate()
    results = rpc.map("w1", gate.enter, range(3), chunk=2, timeout=0.05)
    with pytest.raises(RpcTimeout) as raised:
        next(results)
    assert "at items 0 to 1" in notes(raised.value)
    gate.open()


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        rpc.map([], identity, [1])
    for name, value in (("chunk", 0), ("chunk", -1), ("chunk", 1.5), ("in_flight", 0), ("retry", -1)):
        with pytest.raises(ValueError, match=f"{name} of rpc.map has to be an integer of at least .,? and is {value}"):
            rpc.map("w1", identity, [1], **{name: value})
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

    results = rpc.map(["v1", "v2"], stay, range(40), chunk=2, ordered=ordered, retry=1)
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
    assert list(rpc.map(["v1", "v2"], stay, range(2), chunk=2, ordered=ordered, retry=1)) == [0, 1]
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
        list(rpc.map(["v1", "v2"], identity, range(10), retry=5))


# ---- progress


def test_progress_with_rich(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert list(rpc.map("w1", identity, range(10), progress=True)) == list(range(10))
    assert "rpc.map" in capsys.readouterr().out
    results = rpc.map("w1", identity, itertools.count(), progress=True)
    assert next(results) == 0
    results.close()


def test_progress_with_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, Any]] = []

    class Tqdm:
        def __init__(self, results: Any, *, desc: str, total: int | None) -> None:
            bars.append((desc, total))
            self.results = results

        def __iter__(self) -> Iterator[Any]:
            return iter(self.results)

    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setattr(sys.modules["tqdm"], "tqdm", Tqdm, raising=False)
    assert list(rpc.map("w1", identity, range(10), progress=True)) == list(range(10))
    assert list(rpc.map("w1", identity, iter(range(10)), progress=True)) == list(range(10))
    assert bars == [("rpc.map", 10), ("rpc.map", None)]


def test_progress_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="neither rich nor tqdm is installed"):
        rpc.map("w1", identity, range(10), progress=True)


# ---- cancellation


class Log:
    """Record of what the callee has done, in this process."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.begun = threading.Event()


def waits_at(log: Local[Log], at: int, x: int) -> int:
    log.value.ran.append(x)
    if x == at:
        log.value.begun.set()
        eventually(rpc.cancelled)
        log.value.ran.append("canceled")
    return x


async def sleeps_at(log: Local[Log], at: int, x: int) -> int:
    log.value.ran.append(x)
    if x == at:
        log.value.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.value.ran.append("canceled")
            raise
    return x


@async_execution
def calls_sleeps_at(log: Local[Log], at: int, x: int) -> Any:
    return rpc.rpc_async("w0", sleeps_at, (log, at, x))


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize("how", ["close", "collect", "timeout"])
@pytest.mark.parametrize("function", [waits_at, sleeps_at, calls_sleeps_at])
@pytest.mark.filterwarnings("error")
def test_the_chunks_in_flight_are_canceled(function: Any, how: str, intercepted: bool) -> None:
    log = Log()
    run = functools.partial(function, Local(log), 4)
    with rpc.intercept(client=through) if intercepted else contextlib.nullcontext():
        timeout = 0.1 if how == "timeout" else 0.0
        results = rpc.map(
            "w1", async_execution(run) if function is calls_sleeps_at else run, range(9), chunk=4, timeout=timeout
        )
        assert [next(results) for _ in range(4)] == list(range(4))
        assert log.begun.wait(10)
        if how == "close":
            results.close()
        elif how == "timeout":
            with pytest.raises(RpcTimeout):
                next(results)
        del results
        eventually(lambda: "canceled" in log.ran, what=f"a cancellation in {log.ran}")


def test_an_error_cancels_the_other_chunks() -> None:
    log = Log()
    local = Local(log)

    def run(x: int) -> int:
        if x == 0:
            assert local.value.begun.wait(10)
            raise KeyError("of an item")
        return waits_at(local, 1, x)

    with pytest.raises(KeyError, match="of an item"):
        list(rpc.map("w1", run, range(2), chunk=1))
    eventually(lambda: "canceled" in log.ran)


@async_execution
def canceled_at(log: Local[Log], x: int) -> Any:
    if x == 0:
        log.value.begun.set()
        eventually(rpc.cancelled)
    return rpc.rpc_async("w0", sleeps_at, (log, x, x))


def starts_and_waits(log: Local[Log], x: int) -> Any:
    eventually(rpc.cancelled)
    return sleeps_at(log, x, x)


@pytest.mark.parametrize("function", [canceled_at, starts_and_waits])
@pytest.mark.filterwarnings("error")
def test_deferred_results_of_a_canceled_chunk_are_canceled(clean: Cluster, function: Any) -> None:
    log = Log()
    run: Any = functools.partial(function, Local(log))
    with pytest.raises(RpcTimeout):
        list(rpc.map("w1", async_execution(run) if function is canceled_at else run, range(3), chunk=3, timeout=0.05))
    eventually(lambda: not any(w._worker.engine.stats()["running_requests"] for w in clean))
    eventually(lambda: not any(w._worker.handlers._deferred for w in clean))
    gc.collect()


def test_a_chunk_that_is_canceled_before_its_coroutines_begin(clean: Cluster) -> None:
    coroutines = [later(1), later(2)]

    async def main() -> None:
        deferred = chunks._Deferred(coroutines)
        task = asyncio.create_task(chunks._gather(clean[1]._worker, later, deferred, None, 0))
        del deferred
        await asyncio.sleep(0)  # begins the task, and not those of the coroutines
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.tb  # refers to frames, as a handled error does
        assert [inspect.getcoroutinestate(each) for each in coroutines] == [inspect.CORO_CLOSED] * 2

    asyncio.run(main())


def test_a_canceled_chunk_runs_few_further_items(clean: Cluster) -> None:
    log = Log()
    with pytest.raises(RpcTimeout):
        list(rpc.map("w1", functools.partial(waits_at, Local(log), 500), range(10_000), chunk=10_000, timeout=0.05))
    eventually(lambda: "canceled" in log.ran)
    eventually(lambda: not clean[1]._worker.engine.stats()["running_requests"])
    assert len(log.ran) - log.ran.index("canceled") <= chunks.MOST_IN_SLICE

"""`rpc.map`: many small calls, without a future each."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from map_helpers import identity, later, me, notes

from telegrad import rpc
from telegrad.errors import RemoteError
from telegrad.rpc import map_callee
from telegrad.rpc.functions import async_execution
from telegrad.rpc.map_items import Source
from telegrad.testing import Gate

pytestmark = [pytest.mark.usefixtures("clean")]


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
    "function",
    [lambda x: x + 1, (1).__add__, rpc.functions.async_execution(lambda x: done(x + 1))],
    ids=["lambda", "method-wrapper", "async_execution"],
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
    assert all(b <= map_callee.GROWTH * a for a, b in itertools.pairwise(chunk_sizes[:3]))
    assert max(chunk_sizes) > 100
    assert sum(chunk_sizes) == 20_000


def test_size_by_duration() -> None:
    callee = map_callee.Callee(rpc.get_worker_info("w1"))
    callee.adapt(([0] * 10, 10, None))
    assert callee.size == 10 * map_callee.GROWTH
    callee.adapt(([0] * 10, 10 * map_callee.CHUNK_TIME, None))
    assert callee.size == 1
    callee.adapt(([0] * 10, map_callee.CHUNK_TIME // 2, None))
    assert callee.size == 20
    callee.adapt(([0] * map_callee.MOST_ITEMS, 1, None))
    assert callee.size == map_callee.MOST_ITEMS
    callee.adapt(([0] * 1000, None, None))
    assert callee.size == map_callee.MOST_DEFERRED
    callee.adapt(([bytes(map_callee.CHUNK_BYTES // 2)] * 100, 1, None))
    assert callee.size == 2
    callee.adapt(([], 1, b"error"))
    assert callee.size == 2


@pytest.mark.parametrize(
    "make", [torch.empty, lambda n: bytes(4 * n), lambda n: [torch.empty(n)], lambda n: {1: "x" * 4 * n}]
)
def test_chunks_are_bounded_by_bytes(make: Any) -> None:
    source = Source((make(1000) for _ in range(9)), identity)
    assert [len(source.take(6, 15_000)) for _ in range(4)] == [4, 4, 1, 0]
    assert source.taken == 9


@pytest.mark.parametrize("make", [torch.empty, lambda n: [torch.empty(n)], lambda n: {1: "x" * 4 * n}])
def test_an_item_that_is_expensive_to_copy_ends_its_chunk(make: Any) -> None:
    source = Source(map(make, [1, 20_000, 20_000, 1, 1]), lambda item: [item])
    chunks = [source.take(6, map_callee.CHUNK_BYTES) for _ in range(3)]
    assert [len(chunk) for chunk in chunks] == [2, 1, 2]
    callee = map_callee.Callee(rpc.get_worker_info())
    callee.adapt((list(map(make, [1, 20_000])), 1, None))
    assert callee.size == 1


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

"""`rpc.multicast`: encoded once, stored once, otherwise like separate calls."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from shared_memory_helpers import place
from stopped_processes import resume, stop

from telegrad import autograd, rpc
from telegrad.options import TRANSPORTS, Options
from telegrad.testing import Cluster, Gate, Processes, ResourceSnapshot, assert_quiescent, cluster, eventually

N = 300_000  # floats, 1.2 MB: stored once where memory is shared

seen: dict[str, Any] = {}  # by handlers, by their worker's name


def me() -> str:
    return rpc.get_worker_info().name


def where(x: torch.Tensor) -> Any:
    return place(x)


def keep(x: torch.Tensor) -> Any:
    seen[me()] = x
    return place(x)


def total(*xs: torch.Tensor, scale: float = 1.0) -> float:
    return scale * sum(float(x.sum()) for x in xs)


def add_in_place(x: torch.Tensor, number: float) -> torch.Tensor:
    assert (x == 1.0).all()
    return x.add_(number)


def values(futures: list[Any]) -> list[Any]:
    return [future.wait() for future in futures]


@pytest.fixture
def shared() -> Any:
    """Workers that share memory."""
    with cluster(4, Options(transports=("shm",))) as group:
        x = torch.ones(N)
        eventually(lambda: len(set(values(rpc.multicast((1, 2, 3), where, (x,))))) == 1)
        yield group
        seen.clear()


@pytest.fixture(params=TRANSPORTS)
def any_four(request: pytest.FixtureRequest) -> Any:
    with cluster(4, Options(transports=(request.param,))) as group:
        yield group
        seen.clear()


# ---- one copy


@pytest.mark.usefixtures("shared")
def test_all_have_the_same_memory() -> None:
    for number in range(5):
        x = torch.full((N,), float(number))
        futures = rpc.multicast(["w1", "w2", "w3"], keep, (x,))
        x.fill_(-1.0)  # it has been taken
        places = set(values(futures))
        assert len(places) == 1
        assert None not in places
        kept = [seen.pop(f"w{rank}") for rank in (1, 2, 3)]
        assert all((each == number).all() for each in kept)
        assert len({each.data_ptr() for each in kept}) == 3


def test_all_memory_is_released(shared: Cluster) -> None:
    x = torch.ones(N)
    values(rpc.multicast((1, 2, 3), keep, (x,)))
    engine = shared[0]._worker.engine
    assert engine.stats()["multicast_buffers"] == 1
    del seen["w1"], seen["w2"]
    assert engine.stats()["multicast_buffers"] == 1
    seen.clear()
    eventually(lambda: engine.stats()["multicast_buffers"] == 0)
    for worker in shared:
        assert_quiescent(worker)


@pytest.mark.usefixtures("shared")
def test_receivers_get_separate_tensors() -> None:
    x = torch.ones(N)
    for _ in range(4):
        futures = rpc.multicast((1, 2, 3), keep, (x,))
        values(futures)
        for rank in (1, 2, 3):
            assert (seen[f"w{rank}"] == 1.0).all()
            seen[f"w{rank}"].fill_(float(-rank))
        assert [float(seen[f"w{rank}"].sum()) for rank in (1, 2, 3)] == [-N, -2.0 * N, -3.0 * N]
        assert (x == 1.0).all()


@pytest.mark.usefixtures("shared")
def test_a_worker_listed_twice_gets_two_tensors() -> None:
    first, second = values(rpc.multicast(("w1", "w1"), add_in_place, (torch.ones(N), 1.0)))
    assert (first == 2.0).all()
    assert (second == 2.0).all()


def test_the_caller_may_be_a_receiver(shared: Cluster) -> None:
    x = torch.ones(N)
    got = values(rpc.multicast([info for worker in shared for info in (worker.info,)], add_in_place, (x, 1.0)))
    assert len(got) == 4
    assert all((each == 2.0).all() for each in got)
    assert (x == 1.0).all()


# ---- like separate calls


@pytest.mark.usefixtures("any_four")
def test_values_of_all_sizes() -> None:
    for sizes in ((), (0,), (3,), (1000, 70_000), (N, N // 2, 5), (3_000_000,)):
        xs = [torch.full((size,), 2.0) for size in sizes]
        futures = rpc.multicast((1, 2, 3), total, xs, {"scale": 0.5})
        for x in xs:
            x.zero_()
        assert values(futures) == [float(sum(sizes))] * 3
    nested = {"a": [torch.ones(N), (torch.ones(3), {"b": "text"})], "c": {"a set"}}
    for got in values(rpc.multicast((3, 1), echo, (nested,))):
        assert torch.equal(got["a"][0], nested["a"][0])  # type: ignore[index]
        assert got["a"][1][1] == {"b": "text"}
        assert got["c"] == {"a set"}
    assert rpc.multicast([], echo, (1,)) == []


def echo(x: Any) -> Any:
    return x


class Pickled:
    """Value that counts its picklings."""

    times = 0

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        Pickled.times += 1
        return Pickled, (self.data,)


def unpacked(x: Pickled) -> float:
    return float(x.data.sum())


@pytest.mark.usefixtures("any_four")
def test_arguments_are_encoded_once() -> None:
    Pickled.times = 0
    assert values(rpc.multicast((1, 2, 3), unpacked, (Pickled(torch.ones(N)),))) == [float(N)] * 3
    assert Pickled.times == 1


@pytest.mark.usefixtures("any_four")
def test_functions_by_value() -> None:
    number = 3
    assert values(rpc.multicast((1, 2), lambda x: x + number, (4,))) == [7, 7]


def fail_on(name: str, x: torch.Tensor) -> float:
    if me() == name:
        raise ValueError(f"not on {name}")
    return float(x.sum())


@pytest.mark.usefixtures("any_four")
def test_a_failure_affects_one_receiver() -> None:
    first, second, third = rpc.multicast((1, 2, 3), fail_on, ("w2", torch.ones(N)))
    assert first.wait() == third.wait() == N
    with pytest.raises(ValueError, match="not on w2"):
        second.wait()


@pytest.mark.usefixtures("shared")
def test_arguments_that_cannot_be_sent_raise() -> None:
    with pytest.raises(RuntimeError, match="w9"):
        rpc.multicast(("w1", "w9"), echo, (1,))
    with pytest.raises(RuntimeError, match="pickle"):
        rpc.multicast(("w1", "w2"), echo, (threading.Lock(),))
    with pytest.raises(TypeError, match="callable"):
        rpc.multicast(("w1", "w2"), 7)  # type: ignore[arg-type]
    assert values(rpc.multicast(("w1", "w2"), echo, (1,))) == [1, 1]


def test_multicast_of_a_worker_object(any_four: Cluster) -> None:
    x = torch.ones(N)
    for worker in any_four:
        mine = worker.rref("travels only in calls of its worker")
        futures = worker.multicast(("w1", 3, worker.info), owner_of, (mine,), {"x": x}, timeout=30)
        assert values(futures) == [worker.info.name] * 3


def owner_of(rref: Any, x: torch.Tensor) -> str:
    assert x.sum() == N
    return str(rref.owner_name())


def test_outside_of_a_group() -> None:
    with pytest.raises(RuntimeError, match="init_rpc"):
        rpc.multicast(("w1",), echo, (1,))


def enter_gate() -> None:
    seen["gate"].enter()


@pytest.mark.usefixtures("any_four")
def test_timeouts() -> None:
    gate = seen["gate"] = Gate()
    futures = rpc.multicast((1, 2), enter_gate, timeout=0.2)
    for future in futures:
        with pytest.raises(RuntimeError, match="tim"):
            future.wait()
    gate.open()


def fetch(rref: Any, other: Any) -> Any:
    assert other is rref
    return rref.to_here()


def test_references_are_sent_with_separate_tickets(any_four: Cluster) -> None:
    mine = rpc.RRef(torch.ones(3))
    theirs = rpc.remote("w3", torch.full, ((2,), 7.0))
    for _ in range(3):
        for got in values(rpc.multicast((1, 2, 3), fetch, (mine, mine))):
            assert torch.equal(got, torch.ones(3))
        for got in values(rpc.multicast((1, 2, 3), fetch, (theirs, theirs))):
            assert torch.equal(got, torch.full((2,), 7.0))
        for got in values(rpc.multicast((1, 2), first_of, ([theirs, {"a set"}],))):
            assert torch.equal(got, torch.full((2,), 7.0))
    del mine, theirs, got
    for worker in any_four:
        assert_quiescent(worker)


def first_of(xs: Any) -> Any:
    return xs[0].to_here()


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def test_gradients_are_returned_by_all(any_four: Cluster) -> None:
    for size in (3, N):
        x = torch.ones(size, requires_grad=True)
        with autograd.context() as context_id:
            parts = values(rpc.multicast((1, 2, 3), scaled, (x, 2.0)))
            autograd.backward(context_id, [sum(part.sum() for part in parts)])
            assert (autograd.get_gradients(context_id)[x] == 6.0).all()
    with autograd.context() as context_id:
        assert values(rpc.multicast((1, 2), echo, (1,))) == [1, 1]
    for worker in any_four:
        assert_quiescent(worker, references=False)


def state() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("any_four")
def test_the_callers_state_is_sent() -> None:
    with torch.no_grad():
        assert values(rpc.multicast((1, 2), state)) == [(False, False)] * 2
    with torch.autocast("cpu"):
        assert values(rpc.multicast((1, 2), state)) == [(True, True)] * 2


async def gather(x: torch.Tensor) -> float:
    return sum([await future for future in rpc.multicast(("w1", "w2"), total, (x,))])


def gather_here(x: torch.Tensor) -> float:
    return float(sum(values(rpc.multicast(("w1", "w2"), total, (x,)))))


@pytest.mark.usefixtures("any_four")
def test_inside_handlers() -> None:
    assert rpc.rpc_sync("w3", gather, (torch.ones(N),)) == 2.0 * N
    assert rpc.rpc_sync("w3", gather_here, (torch.ones(N),)) == 2.0 * N


@pytest.mark.usefixtures("any_four")
def test_many_at_once() -> None:
    xs = [torch.full((N // 3,), float(number)) for number in range(20)]
    futures = [rpc.multicast((1, 2, 3), total, (x,)) for x in xs]
    for number, some in enumerate(futures):
        assert values(some) == [number * (N // 3)] * 3


def test_all_gather_reaches_all(any_four: Cluster) -> None:
    def gather_all(rank: int) -> dict[str, Any]:
        return rpc.api._all_gather((rank, torch.full((N,), float(rank))))

    for got in any_four.on_each(gather_all):
        assert {name: value[0] for name, value in got.items()} == {f"w{rank}": rank for rank in range(4)}
        assert all((value[1] == value[0]).all() for value in got.values())


def test_without_shared_memory() -> None:
    with cluster(3, Options(transports=("shm",), shared_memory_bytes=0)):
        x = torch.ones(N)
        for _ in range(3):
            assert values(rpc.multicast((1, 2), where, (x,))) == [None, None]


def test_beyond_the_shared_memory_limit() -> None:
    with cluster(3, Options(transports=("shm",), shared_memory_bytes=8 << 20)):
        kept = [values(rpc.multicast((1, 2), echo, (torch.full((N,), float(i)),))) for i in range(20)]
        for number, both in enumerate(kept):
            assert all((each == number).all() for each in both)


def test_tensors_outlive_their_worker() -> None:
    before = ResourceSnapshot.now()
    with cluster(3, Options(transports=("shm",)), check=False):
        x = torch.ones(N)
        eventually(lambda: len(set(values(rpc.multicast((1, 2), where, (x,))))) == 1)
        values(rpc.multicast((1, 2), keep, (x,)))
    before.assert_not_grown()
    seen["w1"] += 1.0
    assert (seen["w1"] == 2.0).all()
    assert (seen["w2"] == 1.0).all()
    seen.clear()


# ---- deaths


def _stays(rank: int, n: int, init_method: str) -> Any:
    options = Options(init_method=init_method, transports=("shm",))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    if rank > 0:
        signal.pause()
    engine = rpc.api._get_current_rpc_agent().worker.engine
    x = torch.ones(N)
    eventually(lambda: None not in values(rpc.multicast((1, 2), where, (x,))))
    values(rpc.multicast((1, 2), keep, (x,)))
    pid = rpc.rpc_sync("w2", os.getpid)
    os.kill(pid, signal.SIGKILL)
    first, second = rpc.multicast((1, 2), total, (x,))
    with pytest.raises(RuntimeError):
        second.wait()
    sums = [first.wait()]
    values(rpc.multicast((1,), forget))
    eventually(lambda: engine.stats()["multicast_buffers"] == 0)
    eventually(lambda: None not in values(rpc.multicast((1,), where, (x,))))  # in other memory than before
    rpc.shutdown(graceful=False)
    return sums


def forget() -> None:
    seen.clear()


def test_receiver_dies() -> None:
    with Processes(3, _stays, method="forkserver") as group:
        assert group.results(ranks=(0,)) == [[float(N)]]


def _slow(rank: int, n: int, init_method: str) -> Any:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=Options(init_method=init_method))
    if rank > 0:
        signal.pause()
    x = torch.ones(N)
    pid = rpc.rpc_sync("w1", os.getpid)
    values(rpc.multicast((1, 2), total, (x,)))
    stop(pid)
    try:
        begin = time.monotonic()
        pairs = [rpc.multicast((1, 2), total, (x,)) for _ in range(10)]
        assert values([other for _, other in pairs]) == [N] * 10
        took = time.monotonic() - begin
    finally:
        resume(pid)
    assert values([one for one, _ in pairs]) == [N] * 10
    rpc.shutdown(graceful=False)
    return took


def test_a_stopped_receiver_delays_no_other() -> None:
    with Processes(3, _slow, method="forkserver") as group:
        assert group.results(ranks=(0,))[0] < 30  # forever, if they waited for each other

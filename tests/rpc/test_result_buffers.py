"""Results built by `rpc.empty` in shared memory arrive without a copy.

Tensors for which the difference would be visible are copied.
"""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from shared_memory_helpers import Kept, place, use_result_of_killed_peer

from telegrad import rpc
from telegrad.options import Options
from telegrad.testing import Processes, ResourceSnapshot, assert_quiescent, cluster, eventually

N = 300_000  # floats, 1.2 MB

made: dict[str, Any] = {}  # by the last handler


def build(value: float, n: int = N, to: str | None = None) -> torch.Tensor:
    out = rpc.empty(n, to=to)
    out.fill_(value)
    made["place"] = place(out)
    return out


def build_two(value: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    first, second = rpc.empty(2, N), rpc.empty((N,), dtype=torch.int32)
    first.fill_(value)
    second.fill_(int(value))
    made["places"] = place(first), place(second)
    return first, {"second": second}


def build_and_keep(value: float) -> torch.Tensor:
    made["kept"] = build(value)
    return made["kept"]


def write_to_kept(value: float) -> bool:
    """Write to the kept tensor; return whether it was unchanged before."""
    same = bool((made["kept"] == 1.0).all())
    made["kept"].fill_(value)
    return same


def part(begin: int, end: int) -> torch.Tensor:
    return build(5.0)[begin:end]


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    out = build(5.0)
    return out[: N // 2], out[N // 2 :]


def nested(value: float) -> torch.Tensor:
    """Return a tensor that another worker built for this one."""
    return rpc.rpc_sync("w2", build, (value,))


class Builder:
    def build(self, value: float) -> torch.Tensor:
        return build(value)


async def build_later(value: float) -> torch.Tensor:
    return build(value)


def build_in_set(value: float) -> Any:
    """Return a value that the codec cannot encode."""
    return {"a set"}, build(value)


def dtype_of(empty: Any, dtype: torch.dtype) -> torch.dtype:
    return empty(N, dtype=dtype).dtype  # type: ignore[no-any-return]


def warm_up(worker: str = "w1", n: int = N, **kwargs: Any) -> None:
    """Make calls until shared memory is in use."""

    def call() -> bool:
        got = rpc.rpc_sync(worker, build, (0.0, n), kwargs)
        return place(got) is not None

    eventually(call)


@pytest.fixture
def two() -> Any:
    with cluster(2, Options(transports=("shm",))) as group:
        warm_up()
        yield group
        made.clear()


@pytest.mark.usefixtures("two")
def test_a_result_arrives_without_a_copy() -> None:
    seen = set()
    for number in range(5):
        got = rpc.rpc_sync("w1", build, (float(number),))
        assert (got == number).all()
        assert place(got) == made["place"]
        got += 1  # ours
        seen.add(place(got))
        assert not got.requires_grad
        assert got.is_contiguous()
    assert len(seen) <= 2  # it is used again


@pytest.mark.usefixtures("two")
def test_several_in_one_result() -> None:
    first, rest = rpc.rpc_sync("w1", build_two, (7.0,))
    second = rest["second"]
    assert (place(first), place(second)) == made["places"]
    assert first.shape == (2, N)
    assert second.dtype is torch.int32
    assert (first == 7.0).all()
    assert (second == 7).all()


@pytest.mark.usefixtures("two")
def test_all_kinds_of_calls() -> None:
    assert place(rpc.rpc_async("w1", build, (1.0,)).wait()) == made["place"]
    with torch.no_grad():
        got = rpc.rpc_sync("w1", build, (2.0,))
    assert place(got) == made["place"]
    assert (got == 2.0).all()
    _, got = rpc.rpc_sync("w1", build_in_set, (3.0,))
    assert place(got) == made["place"]
    got = rpc.rpc_sync("w1", build_later, (4.0,))
    assert (got == 4.0).all()
    builder = rpc.remote("w1", Builder)
    assert place(builder.rpc_sync().build(6.0)) == made["place"]
    got = builder.rpc_async().build(7.0).wait()
    assert place(got) == made["place"]
    assert (got == 7.0).all()
    del builder
    rref = rpc.remote("w1", build, (5.0,))
    assert (rref.to_here() == 5.0).all()
    assert (rref.to_here() == 5.0).all()


@pytest.mark.usefixtures("two")
def test_a_result_that_the_callee_keeps_is_copied() -> None:
    for _ in range(3):
        got = rpc.rpc_sync("w1", build_and_keep, (1.0,))
        assert place(got) != made["place"]
        got.fill_(9.0)
        assert rpc.rpc_sync("w1", write_to_kept, (3.0,))
        assert (got == 9.0).all()


@pytest.mark.usefixtures("two")
def test_a_part_of_a_buffer() -> None:
    got = rpc.rpc_sync("w1", part, (0, 1000))
    assert place(got) == made["place"]
    assert got.untyped_storage().nbytes() == 4000
    got = rpc.rpc_sync("w1", part, (160, N))  # on a boundary of 64 bytes, as all received tensors
    file, offset = made["place"]
    assert place(got) == (file, offset + 640)
    assert (got == 5.0).all()
    got = rpc.rpc_sync("w1", part, (1, N))
    assert got.data_ptr() % 64 == 0
    assert (got == 5.0).all()
    assert got.shape == (N - 1,)


@pytest.mark.usefixtures("two")
def test_two_parts_of_a_buffer_have_separate_memory() -> None:
    first, second = rpc.rpc_sync("w1", halves)
    first.zero_()
    assert (second == 5.0).all()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_two_callers_get_separate_memory() -> None:
    with cluster(3, Options(transports=("shm",))) as group:
        warm_up("w1")
        with group[2]:
            warm_up("w1")
            theirs = rpc.rpc_sync("w1", build, (2.0,))
            assert place(theirs) == made["place"]
        mine = rpc.rpc_sync("w1", build, (1.0,))
        assert place(mine) == made["place"]
        assert (theirs == 2.0).all()
        # A tensor built for another worker is copied.
        with group[2]:
            got = rpc.rpc_sync("w1", build, (3.0, N, "w0"))
        assert made["place"] is not None
        assert place(got) != made["place"]
        assert (got == 3.0).all()
        # So is a received one: it is in memory of its sender.
        got = rpc.rpc_sync("w1", nested, (4.0,))
        assert (got == 4.0).all()


@pytest.mark.usefixtures("two")
def test_arguments_are_copied() -> None:
    def lent() -> torch.Tensor:
        rpc.rpc_sync("w1", torch.sum, (torch.ones(N),))
        return rpc.empty(N, to="w1")

    eventually(lambda: place(lent()) is not None)
    for number in range(3):
        x = lent()
        x.fill_(number)
        assert rpc.rpc_sync("w1", torch.sum, (x,)) == number * N
        got = rpc.rpc_sync("w1", torch.Tensor.add_, (x, 1.0))
        assert (x == number).all()
        assert (got == number + 1).all()
    assert place(x) is not None
    del x


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_without_shared_memory_it_is_an_ordinary_tensor(transport: str) -> None:
    with cluster(2, Options(transports=(transport,))):
        for number in range(3):
            got = rpc.rpc_sync("w1", build, (float(number),))
            assert made["place"] is None
            assert (got == number).all()


def test_beyond_the_shared_memory_limit() -> None:
    with cluster(2, Options(transports=("shm",), shared_memory_bytes=8 << 20)):
        warm_up()
        kept = [rpc.rpc_sync("w1", build, (float(number),)) for number in range(20)]
        assert made["place"] is None
        for number, got in enumerate(kept):
            assert (got == number).all()


@pytest.mark.usefixtures("two")
@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_sizes_and_types() -> None:
    for size, dtype in (((0,), None), ((3, 0), torch.bool), ((), torch.int8), ((7, 9), torch.bfloat16)):
        assert rpc.empty(*size, dtype=dtype).shape == size
        assert rpc.empty(size, to="w1", dtype=dtype).dtype is (dtype or torch.get_default_dtype())
    for like_torch in (torch.empty, rpc.empty):  # where there is no telling them apart
        with pytest.raises(RuntimeError, match="negative dimension"):
            rpc.rpc_sync("w1", like_torch, (-1000, -1000))
        with pytest.raises(RuntimeError, match="overflow"):
            rpc.rpc_sync("w1", like_torch, (1 << 62,))
        assert rpc.rpc_sync("w1", dtype_of, (like_torch, torch.qint8)) == torch.qint8
    big = rpc.rpc_sync("w1", build, (1.0, 20 << 20))
    assert big.sum() == 20 << 20
    with pytest.raises(RuntimeError, match="unknown"):
        rpc.empty(3, to="unknown")


def test_outside_of_a_group() -> None:
    assert rpc.empty(N).shape == (N,)
    with pytest.raises(RuntimeError, match="init_rpc"):
        rpc.empty(N, to="w1")


def test_calls_to_oneself() -> None:
    with cluster(1):
        got = rpc.rpc_sync("w0", build, (3.0,))
        assert (got == 3.0).all()
        kept = rpc.rpc_sync("w0", build_and_keep, (1.0,))
        kept.fill_(2.0)
        assert (made["kept"] == 1.0).all()
    made.clear()


def test_no_memory_is_leaked() -> None:
    before = ResourceSnapshot.now()
    with cluster(2, Options(transports=("shm",)), check=False) as group:
        warm_up()
        core = group[1]._worker
        kept = rpc.rpc_sync("w1", build_and_keep, (1.0,))
        eventually(lambda: core.engine.stats()["live_blocks"] == 1)
    made["kept"] += 1  # the memory outlives its worker
    assert (made["kept"] == 2.0).all()
    assert (kept == 1.0).all()
    made.clear()
    assert_quiescent(core)
    del kept
    before.assert_not_grown()


# ---- forks and deaths


def test_forks_have_separate_memory() -> None:
    with cluster(2, Options(transports=("shm",)), check=False):  # the loader keeps a process until it is collected
        warm_up()
        rpc.rpc_sync("w1", build_and_keep, (1.0,))
        x = made.pop("kept")
        assert place(x) is not None
        data = Kept(x, multiprocessing.get_context("fork").Event())
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        totals = iter(loader)
        x.fill_(7.0)
        data.go.set()
        assert list(totals) == [N, 2.0 * N, 3.0 * N]
        assert (x == 7.0).all()
        del x, data, loader, totals
        warm_up()
        got = rpc.rpc_sync("w1", build, (2.0,))
        assert (got == 2.0).all()


def test_callee_dies() -> None:
    with Processes(2, use_result_of_killed_peer, warm_up, build, (2.0,), method="forkserver") as group:
        assert group.results(ranks=(0,)) == [3.0 * N]


def _die_with(x: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def keep_for(to: str) -> None:
    """Keep a leased buffer on this worker."""
    made["kept"] = rpc.empty(N, to=to).fill_(1.0)


def _receiver_dies(rank: int, n: int, init_method: str) -> float:
    options = Options(init_method=init_method, transports=("shm",))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    if rank == 1:
        signal.pause()
    rpc.rpc_sync("w1", torch.sum, (torch.ones(N),))

    def is_shared() -> bool:
        rpc.rpc_sync("w1", torch.sum, (torch.ones(N),))
        keep_for("w1")
        return place(made["kept"]) is not None

    eventually(is_shared)
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("w1", _die_with, (made["kept"],))
    eventually(lambda: rpc.api._get_current_rpc_agent().worker.engine.stats()["connections"] == 0)
    made["kept"] += 1
    total = float(made["kept"].sum())
    keep_for("w1")
    assert place(made["kept"]) is None
    rpc.shutdown(graceful=False)
    return total


def test_receiver_dies() -> None:
    with Processes(2, _receiver_dies, method="forkserver") as group:
        assert group.results(ranks=(0,)) == [2.0 * N]

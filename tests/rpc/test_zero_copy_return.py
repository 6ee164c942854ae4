"""Zero-copy return: argument tensors that the handler does not keep are returned.

All other tensors are copied.
"""

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from shared_memory_helpers import Kept, place, use_result_of_killed_peer

from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.options import Options
from telegrad.testing import Processes, ResourceSnapshot, assert_quiescent, cluster, eventually

N = 300_000  # floats, 1.2 MB

seen: dict[str, Any] = {}  # by the last handler


def same(x: Any) -> Any:
    seen["place"] = place(x)
    return x


def add_one(x: torch.Tensor) -> torch.Tensor:
    return same(x).add_(1.0)  # type: ignore[no-any-return]


def in_set(x: torch.Tensor) -> Any:
    """Return a value that the codec cannot encode."""
    return {"a set"}, add_one(x)


async def later(x: torch.Tensor) -> torch.Tensor:
    return add_one(x)


def keep(x: torch.Tensor) -> torch.Tensor:
    seen["kept"] = same(x)
    return x


def keep_view(x: torch.Tensor) -> torch.Tensor:
    seen["kept"] = same(x)[:10]
    return x


def keep_storage(x: torch.Tensor) -> torch.Tensor:
    seen["kept"] = torch.tensor([], dtype=x.dtype).set_(same(x).untyped_storage())
    return x


def keep_array(x: torch.Tensor) -> torch.Tensor:
    seen["kept"] = same(x).numpy()
    return x


def keep_in_graph(x: torch.Tensor) -> torch.Tensor:
    """Keep the tensor in a graph that has saved it for its backward pass."""
    product = same(x) * torch.ones(N, requires_grad=True)
    seen["kept"] = Saved(product.grad_fn)
    return x


class Saved:
    def __init__(self, node: Any) -> None:
        self.node = node

    def sum(self) -> float:
        return float(self.node._saved_self.sum())


def keep_in_thread(x: torch.Tensor) -> torch.Tensor:
    hold = threading.Event()

    def work(held: torch.Tensor) -> None:
        assert hold.wait(60)
        seen["kept"] = held

    thread = threading.Thread(target=work, args=(same(x),))
    thread.start()
    seen["end"] = lambda: (hold.set(), thread.join())
    return x


def kept_sum() -> float:
    if "end" in seen:
        seen.pop("end")()
    return float(seen.pop("kept").sum())


def part(x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return same(x)[begin:end]  # type: ignore[no-any-return]


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return same(x)[: N // 2], x[N // 2 :]


def both(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    seen["places"] = place(x), place(y)
    return {"x": x, "y": y}


def forward(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that another worker returns to this one."""
    return rpc.rpc_sync("w2", add_one, (x,))


def small_part(x: torch.Tensor) -> torch.Tensor:
    """Return a small part of a tensor returned to this worker."""
    came = rpc.rpc_sync("w0", same, (x,))
    assert place(came) == seen["place"]
    return came[:10_000]


class BlocksOnRelease(bytearray):
    """Bytes with a finalizer that blocks."""

    def __del__(self) -> None:
        assert seen["release"].wait(60)


def keep_message(_: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the message, and so its memory, until it is released."""
    return same(x), torch.frombuffer(BlocksOnRelease(1000), dtype=torch.uint8)


def after_the_last_message(x: torch.Tensor) -> torch.Tensor:
    """Return when the message of the last handler is released."""
    stats = seen["stats"]
    blocks = stats()["live_blocks"]
    seen["release"].set()
    eventually(lambda: stats()["live_blocks"] < blocks)
    assert place(x) == seen["place"]
    return x


def part_at_the_last_address(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that begins where the last handler's began."""
    last, mine = seen["place"], place(x)
    assert mine is not None
    assert (mine[0], mine[1] < last[1]) == (last[0], True)
    return same(x[(last[1] - mine[1]) // 4 :])  # type: ignore[no-any-return]


class Server:
    def add_one(self, x: torch.Tensor) -> torch.Tensor:
        return add_one(x)


def warm_up(worker: str = "w1") -> None:
    """Make calls until shared memory is in use."""
    eventually(lambda: place(rpc.rpc_sync(worker, same, (torch.zeros(N),))) is not None)


@pytest.fixture
def two() -> Any:
    with cluster(2, Options(transports=("shm",))) as group:
        warm_up()
        yield group
        seen.clear()


@pytest.mark.usefixtures("two")
def test_an_argument_is_returned_to_its_own_memory() -> None:
    places = set()
    x = torch.ones(N)
    for number in range(5):
        got = rpc.rpc_sync("w1", add_one, (x,))
        assert place(got) == seen["place"]
        assert (got == 2.0).all()
        got += number  # ours
        assert (x == 1.0).all()
        assert not got.requires_grad
        places.add(place(got))
    assert len(places) <= 2  # it is used again


@pytest.mark.usefixtures("two")
def test_returned_tensors_can_be_sent_again() -> None:
    x = torch.zeros(N)
    for _ in range(10):
        x = rpc.rpc_sync("w1", add_one, (x,))
    assert (x == 10.0).all()
    for _ in range(5):
        x = rpc.rpc_async("w1", add_one, (x,)).wait().mul_(2.0)
    assert (x == 382.0).all()


@pytest.mark.usefixtures("two")
def test_all_kinds_of_calls() -> None:
    x = torch.ones(N)
    assert place(rpc.rpc_async("w1", add_one, (x,)).wait()) == seen["place"]
    got = rpc.rpc_sync("w1", add_one, kwargs={"x": x})
    assert place(got) == seen["place"]
    server = rpc.remote("w1", Server)
    got = server.rpc_sync().add_one(x)
    assert place(got) == seen["place"]
    assert (got == 2.0).all()
    del server
    for function in (in_set, later):
        got = rpc.rpc_sync("w1", function, (x,))  # type: ignore[arg-type]
        assert ((got[1] if isinstance(got, tuple) else got) == 2.0).all()
    got = rpc.rpc_sync("w1", both, (x, x + 1.0))
    assert (place(got["x"]), place(got["y"])) == seen["places"]
    assert (got["x"] == 1.0).all()
    assert (got["y"] == 2.0).all()
    rref = rpc.remote("w1", add_one, (x,))
    for _ in range(2):
        assert (rref.to_here() == 2.0).all()
    got = rpc.rpc_sync("w1", both, (x, x))
    got["x"] += 1.0
    assert (got["x"] == 2.0).all()


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("function", [keep, keep_view, keep_storage, keep_array, keep_in_graph, keep_in_thread])
def test_tensors_that_the_handler_keeps_are_copied(function: Any) -> None:
    for _ in range(3):
        got = rpc.rpc_sync("w1", function, (torch.ones(N),))
        assert seen["place"] is not None
        assert place(got) != seen["place"]
        got.fill_(9.0)
        rpc.rpc_sync("w1", same, (torch.full((N,), 5.0),))
        assert rpc.rpc_sync("w1", kept_sum) == (10 if function is keep_view else N)
        assert (got == 9.0).all()


@pytest.mark.usefixtures("two")
def test_parts_of_an_argument() -> None:
    x = torch.arange(N, dtype=torch.float32)
    got = rpc.rpc_sync("w1", part, (x, 160, N))
    file, offset = seen["place"]
    assert place(got) == (file, offset + 640)
    assert torch.equal(got, x[160:])
    got = rpc.rpc_sync("w1", part, (x, 0, 10_000))  # would keep the rest from being used again
    assert place(got) != seen["place"]
    assert torch.equal(got, x[:10_000])
    got = rpc.rpc_sync("w1", part, (x, 1, N))
    assert got.data_ptr() % 64 == 0
    assert torch.equal(got, x[1:])
    first, second = rpc.rpc_sync("w1", halves, (x,))
    first.zero_()
    assert torch.equal(second, x[N // 2 :])


def test_a_small_part_of_a_returned_tensor_is_copied(two: Any) -> None:
    with two[1]:
        warm_up("w0")
    x = torch.arange(N, dtype=torch.float32)
    got = rpc.rpc_sync("w1", small_part, (x,))
    assert place(got) != seen["place"]
    assert torch.equal(got, x[:10_000])


@pytest.mark.usefixtures("two")
def test_returned_memory_is_not_mistaken_for_its_next_content() -> None:
    seen["release"] = threading.Event()
    before = torch.zeros(N // 3)
    got, _ = rpc.rpc_sync("w1", keep_message, (before, torch.zeros(N)))
    assert place(got) == seen["place"]
    del got
    x = torch.arange(len(before) + N, dtype=torch.float32)  # where both were
    got = rpc.rpc_sync("w1", part_at_the_last_address, (x,))
    assert place(got) == seen["place"]
    assert torch.equal(got, x[-len(got) :])
    seen["release"].set()


def test_returning_memory_does_not_return_its_next_content(two: Any) -> None:
    seen["release"], seen["stats"] = threading.Event(), two[1]._worker.engine.stats
    rpc.rpc_sync("w1", keep_message, (torch.zeros(0), torch.zeros(N)))
    assert place(rpc.rpc_sync("w1", after_the_last_message, (torch.zeros(N),))) == seen["place"]


def test_replies_to_other_workers_are_copied() -> None:
    with cluster(3, Options(transports=("shm",))) as group:
        warm_up("w1")
        with group[1]:
            warm_up("w2")
        for _ in range(3):
            got = rpc.rpc_sync("w1", forward, (torch.ones(N),))
            assert (got == 2.0).all()
            assert place(got) != seen["place"]
    seen.clear()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_without_shared_memory_it_is_an_ordinary_tensor(transport: str) -> None:
    with cluster(2, Options(transports=(transport,))):
        for number in range(3):
            got = rpc.rpc_sync("w1", add_one, (torch.full((N,), float(number)),))
            assert (got == number + 1.0).all()
    seen.clear()


@pytest.mark.usefixtures("two")
def test_gradients_are_those_of_copies() -> None:
    x = torch.ones(N, requires_grad=True)
    with context() as number:
        loss = (rpc.rpc_sync("w1", torch.mul, (x, 3.0)) * rpc.rpc_sync("w1", same, (x,))).sum()
        backward(number, [loss])
        assert (get_gradients(number)[x] == 6.0).all()


def test_many_threads(two: Any) -> None:
    right: list[int] = []

    def work(number: int) -> None:
        with two[0]:
            for turn in range(50):
                x = torch.full((N // 4,), float(number * 100 + turn))
                got = rpc.rpc_sync("w1", torch.Tensor.add_, (x, 1.0))
                assert (got == x + 1.0).all()
        right.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == [0, 1, 2, 3]


def test_no_memory_is_leaked() -> None:
    before = ResourceSnapshot.now()
    with cluster(2, Options(transports=("shm",)), check=False) as group:
        warm_up()
        core = group[0]._worker
        kept = rpc.rpc_sync("w1", add_one, (torch.ones(N),))
        assert place(kept) is not None
        eventually(lambda: core.engine.stats()["live_blocks"] == 1)
    kept += 1  # the memory outlives its worker
    assert (kept == 3.0).all()
    del kept
    seen.clear()
    assert_quiescent(core)
    before.assert_not_grown()


# ---- forks and deaths


def test_forks_have_separate_memory() -> None:
    with cluster(2, Options(transports=("shm",)), check=False):  # the loader keeps a process until it is collected
        warm_up()
        x = rpc.rpc_sync("w1", same, (torch.ones(N),))
        assert place(x) == seen["place"]
        data = Kept(x, multiprocessing.get_context("fork").Event())
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        totals = iter(loader)
        x.fill_(7.0)
        data.go.set()
        assert list(totals) == [N, 2.0 * N, 3.0 * N]
        assert (x == 7.0).all()
        del x, data, loader, totals
        warm_up()
        assert (rpc.rpc_sync("w1", add_one, (torch.ones(N),)) == 2.0).all()
    seen.clear()


def test_the_peer_dies() -> None:
    with Processes(2, use_result_of_killed_peer, warm_up, add_one, (torch.ones(N),), method="forkserver") as group:
        assert group.results(ranks=(0,)) == [3.0 * N]

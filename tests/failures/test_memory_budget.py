"""Many workers of one host share memory within `arena_budget_bytes`."""

import pytest
import torch

from telegrad import rpc
from telegrad.testing.processes import processes

TENSOR = 16 << 10  # bytes: as many workers exchange


def talk(rank: int, n: int, init_method: str, peers: int, budget: int) -> tuple[int, int, int]:
    """Exchange tensors with others; return used bytes, limit, wrong results."""
    options = rpc.Options(init_method=init_method, arena_budget_bytes=budget, spin_us=0)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    to = [f"w{(rank + 1 + i * (n // peers)) % n}" for i in range(peers)]
    to = [name for name in to if name != f"w{rank}"]
    correct = 0
    for turn in range(4):
        value = torch.full((TENSOR // 4,), float(rank + turn))
        futures = [rpc.rpc_async(name, torch.add, (value, 1.0), timeout=0) for name in to]
        correct += sum(bool((future.wait() == rank + turn + 1).all()) for future in futures)
    limit = rpc.debug_info().limits["arena_budget_bytes"]
    rpc.shutdown()
    return limit.used, limit.limit, correct - 4 * len(to)


def check_within_budget(workers: int, peers: int, budget: int, timeout: float) -> list[int]:
    found = processes(workers, talk, peers, budget, method="forkserver", timeout=timeout)
    assert all(used <= limit == budget and wrong == 0 for used, limit, wrong in found)
    return [used for used, _, _ in found]


@pytest.mark.timeout(120)
def test_32_workers_within_the_budget() -> None:
    used = check_within_budget(32, 31, 4 << 30, 100)
    assert max(used) < 2 * 31 * (512 << 10)  # arenas for requests and replies, and what is cached


@pytest.mark.timeout(120)
def test_workers_with_a_budget_that_is_too_small() -> None:
    used = check_within_budget(8, 7, 600 << 10, 100)
    assert max(used) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_256_workers_within_the_budget() -> None:
    used = check_within_budget(256, 16, 4 << 30, 550)
    assert max(used) < 2 * 2 * 16 * (512 << 10)

"""Calls over every transport, and its choice.

A pair of workers uses the first transport that works, and logs why it does not use a better one.
"""

import logging
import multiprocessing
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.group import addresses
from telegrad.options import TRANSPORTS, Options
from telegrad.testing import Cluster, ResourceSnapshot, assert_quiescent, cluster

LARGE = 100_000  # floats; sent in shared memory if the pair has some


def echo(x: Any) -> Any:
    return x


def add_in_place(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.add_(number)


@pytest.fixture(params=TRANSPORTS)
def two(request: pytest.FixtureRequest) -> Any:
    with cluster(2, Options(transports=(request.param,))) as group:
        assert {a.partition(":")[0] for w in group for a in w._worker.member.addresses} == {request.param}
        yield group


def test_values_of_all_sizes(two: Cluster) -> None:
    assert rpc.rpc_sync("w1", echo, ("x" * 1_000_000,)) == "x" * 1_000_000
    for size in (0, 1, 1000, 8191, 8192, LARGE, 3_000_000):
        for number in range(3):
            x = torch.full((size,), float(number))
            assert torch.equal(rpc.rpc_sync("w1", echo, (x,)), x)


def test_both_ends_own_their_tensors(two: Cluster) -> None:
    x = torch.zeros(LARGE)
    kept = []
    for number in range(8):
        kept.append(rpc.rpc_sync("w1", add_in_place, (x, float(number))))
        assert not x.any()  # changes of the callee's copy are not visible,
        x.fill_(0)
    for number, y in enumerate(kept):  # and results do not change when others arrive
        assert torch.equal(y, torch.full((LARGE,), float(number)))
        y.mul_(2)
    assert [float(y[-1]) for y in kept] == [2.0 * number for number in range(8)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_outlive_their_workers(transport: str) -> None:
    before = ResourceSnapshot.now()
    with cluster(2, Options(transports=(transport,)), check=False) as group:
        kept = [group[0].rpc_sync("w1", torch.full, ((LARGE,), float(i))) for i in range(6)]
        core = group[0]._worker
    before.assert_not_grown()
    for number, y in enumerate(kept):
        y += 1
        assert torch.equal(y, torch.full((LARGE,), number + 1.0))
    assert core.engine.stats()["live_blocks"] == 6
    del kept, y
    assert_quiescent(core)


def test_beyond_the_shared_memory_limit() -> None:
    with cluster(2, Options(shared_memory_bytes=4 << 20)):
        kept = [rpc.rpc_sync("w1", torch.full, ((LARGE,), float(i))) for i in range(40)]
        for number, y in enumerate(kept):
            assert torch.equal(y, torch.full((LARGE,), float(number)))


def test_without_shared_memory() -> None:
    with cluster(2, Options(shared_memory_bytes=0)):
        for number in range(5):
            assert rpc.rpc_sync("w1", torch.full, ((LARGE,), float(number))).sum() == LARGE * number


def test_pair_falls_back_and_logs_the_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = addresses.candidates

    def gone(*args: Any) -> list[str]:
        return ["shm:@telegrad-no-listener", *[a for a in real(*args) if not a.startswith("shm:")]]

    monkeypatch.setattr(addresses, "candidates", gone)
    with caplog.at_level(logging.INFO), cluster(2, Options(transports=("shm", "unix"))):
        assert rpc.rpc_sync("w1", abs, (-1,)) == 1
    assert "w1 is reached at unix:" in caplog.text
    assert "cannot reach shm:@telegrad-no-listener: Connection refused" in caplog.text


class Received(torch.utils.data.Dataset[float]):
    """Dataset over received tensors, read in forked processes after `go`."""

    def __init__(self, x: torch.Tensor | None, go: Any) -> None:
        self.x, self.go = x, go

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        assert self.go.wait(60)
        assert self.x is not None
        share = float(self.x[index::4].sum())
        self.x += 1.0  # the child's own copy
        return share


def test_forked_loader_reads_received_tensors() -> None:
    with cluster(2, check=False):  # the loader keeps a process until it is collected
        received = [rpc.rpc_sync("w1", torch.full, ((LARGE,), 7.0)) for _ in range(4)]
        data = Received(received.pop(), multiprocessing.get_context("fork").Event())
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        shares = iter(loader)
        data.x = None  # returned, so its memory is used again
        others = [rpc.rpc_sync("w1", torch.full, ((LARGE,), 9.0)) for _ in range(4)]
        data.go.set()
        assert list(shares) == [(7.0 + i) * LARGE / 4 for i in range(4)]
        assert all(bool((y == 9.0).all()) for y in others)
        assert all(bool((y == 7.0).all()) for y in received)

"""Shared memory: released after a peer's death; without it, tensors go as bytes."""

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_helpers import TIMEOUT, Actor, actors, begin_calls, call, failures_of_calls, hang, state

from telegrad import rpc
from telegrad.testing import ResourceSnapshot, eventually

N = 1_000_000  # floats
HELD = 20


# ---- steps


def shared_bytes() -> int:
    """Return the bytes of mapped memory that other workers may have mapped as well."""
    total = 0
    if "maps" not in state:
        state["maps"] = Path("/proc/self/maps").open()  # noqa: SIM115 -- stays open: no descriptor is needed then
    maps = state["maps"]
    maps.seek(0)
    for line in maps:
        if "memfd:telegrad" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            total += end - begin
    return total


def wait_until_not_shared(before: int) -> None:
    eventually(lambda: shared_bytes() <= before, TIMEOUT)


def measure() -> None:
    state["before"] = shared_bytes(), len(ResourceSnapshot.now().fds)


def share(to: str) -> int:
    """Exchange tensors with another worker; return the bytes shared since then."""
    state["got"] = [call(to, torch.mul, torch.ones(N), i) for i in range(HELD)]
    state["lent"] = [rpc.empty(N, to=to).fill_(i) for i in range(HELD)]
    return shared_bytes() - state["before"][0]


def use(to: str) -> None:
    """Use received tensors after the peer's death, when no memory is shared."""
    for i in range(HELD):
        for held in ("got", "lent"):
            x = state[held][i]
            assert (x == i).all()
            x += 1
            assert (x == i + 1).all()
    with pytest.raises(RuntimeError, match="is lost"):
        call(to, torch.neg, state["lent"][0])


def release_tensors() -> None:
    del state["got"], state["lent"]
    gc.collect()
    shared, descriptors = state["before"]
    wait_until_not_shared(shared)
    eventually(lambda: len(ResourceSnapshot.now().fds) <= descriptors, TIMEOUT)


def refuse_descriptors() -> None:
    """Prevent new file descriptors in this process."""
    few = 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state["limits"] = soft, hard
    held = state["descriptors"] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    while True:
        try:
            held.append(os.dup(2))
        except OSError:
            return


def allow_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, state.pop("limits"))
    for fd in state.pop("descriptors"):
        os.close(fd)


def exchange(to: str) -> None:
    for i in range(HELD):
        assert (call(to, torch.mul, torch.ones(N), i) == i).all()


def exchange_until_shared(to: str, before: int) -> None:
    def shared() -> bool:
        exchange(to)
        return shared_bytes() > before

    eventually(shared, TIMEOUT)


# ---- tests


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Actor]]:
    with actors(2, tmp_path, transports=("shm",)) as group:
        yield group


def test_memory_shared_with_a_killed_peer_is_released(two: list[Actor]) -> None:
    w0, w1 = two
    w0.do(measure)
    assert w0.do(share, "w1") >= HELD * N  # a part of it at least: the first ones go as bytes
    w0.do(begin_calls, "w1", hang, 3)
    w1.end()
    w0.do(use, "w1")
    assert len(w0.do(failures_of_calls)[1]) == 3
    w0.do(release_tensors)


@pytest.mark.parametrize("which", [0, 1], ids=["sender", "receiver"])
def test_without_descriptors_tensors_are_sent_as_bytes(two: list[Actor], which: int) -> None:
    w0 = two[0]
    w0.do(call, "w1", abs, -1)  # they are connected
    before = w0.do(shared_bytes)
    two[which].do(refuse_descriptors)
    w0.do(exchange, "w1")
    w0.do(wait_until_not_shared, before)  # an offer may be under way
    two[which].do(allow_descriptors)
    w0.do(exchange_until_shared, "w1", before)

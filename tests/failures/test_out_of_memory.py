"""Messages without memory at the receiver fail only their own call."""

import gc
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.autograd import context
from telegrad.errors import ReceiverOutOfMemory
from telegrad.rpc import Options, RRef
from telegrad.testing import assert_quiescent, eventually, processes
from telegrad.worker.default_worker import current_worker

LARGE = 72 << 20  # bytes
MARGIN = 48 << 20

_go_on = threading.Event()


def limit_memory() -> None:
    """Limit the memory of this process to little more than it uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MARGIN, resource.RLIM_INFINITY))


def unlimit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def assert_no_leaks() -> None:
    """Check that w1 has no references, calls or autograd contexts left."""
    worker = current_worker()
    assert worker is not None

    def left() -> Any:
        gc.collect()
        table = worker.references.stats()
        return table.owners or table.forks or table.pins or table.users or any(worker.autograd.left().values())

    eventually(lambda: not left(), what="references or contexts on w1 to go")


def wait_for_release() -> str:
    _go_on.wait(60)
    _go_on.clear()
    return "undisturbed"


def release() -> None:
    _go_on.set()


def zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def first(values: list[Any]) -> Any:
    return values[0]


def with_reference(size: int) -> list[Any]:
    return [RRef(3), zeros(size)]


@contextmanager
def no_memory(says: str) -> Iterator[None]:
    with pytest.raises(ReceiverOutOfMemory, match=says) as caught:
        yield
    assert isinstance(caught.value, MemoryError)


def _arguments() -> None:
    """Send requests for which w1 has no memory."""
    large, mine, theirs = zeros(LARGE), RRef(1), rpc.remote("w1", int, (2,))
    theirs.to_here()
    rpc.rpc_sync("w1", limit_memory)
    says = r"worker w1 has no memory for a message of \d+ bytes"
    with no_memory("len on w1: " + says):
        rpc.rpc_sync("w1", len, (large,))
    with no_memory(says):
        rpc.rpc_async("w1", first, ([object, large],)).wait()
    for reference in (mine, theirs):
        with no_memory(says):
            rpc.rpc_sync("w1", first, ([reference, large],))
        with no_memory(says):
            rpc.remote("w1", first, ([reference, large],)).to_here()
    with no_memory(says):
        rpc.remote("w1", len, (large,)).to_here()
    for call in rpc.multicast(["w1", "w1"], first, ([mine, large],)):
        with no_memory(says):
            call.wait()
    with context(), no_memory(says):
        rpc.rpc_sync("w1", len, (large,))
    rpc.rpc_sync("w1", unlimit_memory)
    assert rpc.rpc_sync("w1", len, (large,)) == LARGE
    assert rpc.rpc_sync("w1", first, ([theirs, 1],)).to_here() == 2


def _results() -> None:
    """Request replies for which w0, this process, has no memory."""
    limit_memory()
    says = r"worker w0 has no memory for a message of \d+ bytes"
    with no_memory("the result of zeros on w1: " + says):
        rpc.rpc_sync("w1", zeros, (LARGE,))
    with no_memory(says):
        rpc.rpc_async("w1", zeros, (LARGE,)).wait()
    with no_memory(says):
        rpc.rpc_sync("w1", with_reference, (LARGE,))
    there = rpc.remote("w1", zeros, (LARGE,))
    with no_memory("the result of to_here on w1: " + says):
        there.to_here()
    unlimit_memory()
    assert there.to_here().numel() == LARGE


def _calls(rank: int, n: int, init_method: str, transports: list[str]) -> None:
    torch.set_num_threads(1)
    for transport in transports:
        options = Options(init_method=init_method, transports=(transport,))
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
        if rank == 0:
            _check_calls()
        rpc.shutdown()


def _check_calls() -> None:
    worker = current_worker()
    assert worker is not None
    for check in (_arguments, _results):
        held = rpc.remote("w1", list, ((1, 2),))
        call = rpc.rpc_async("w1", wait_for_release)
        assert held.to_here() == [1, 2]
        check()
        assert held.to_here() == [1, 2]
        rpc.rpc_sync("w1", release)
        assert call.wait() == "undisturbed"
        assert not worker.members.lost_names()
        del held, call
        assert_quiescent(worker)
        rpc.rpc_sync("w1", assert_no_leaks)


def test_no_memory_fails_the_call_alone() -> None:
    # Not forked: this process may have free memory to inherit, which the limit does not take.
    processes(2, _calls, ["shm", "unix", "tcp"], method="spawn", timeout=50)

"""Signal handlers that raise while the core sends a large request."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stopped_processes import resume, stop

from telegrad import rpc
from telegrad.streams.service import Streams
from telegrad.testing import Processes, eventually
from telegrad.worker.default_worker import current_worker

LARGE = 64 << 20  # bytes; more than a socket takes


class Timer(Exception):
    """Exception of the signal handler."""


seen: list[str] = []


def record(_: torch.Tensor) -> None:
    seen.append("runs")
    eventually(rpc.cancelled)
    seen.append("is canceled")


def record_items(_: torch.Tensor) -> Iterator[int]:
    seen.append("runs")
    yield from itertools.count()


def report(_: torch.Tensor) -> tuple[list[str], int]:
    worker = current_worker()
    assert worker is not None
    eventually(lambda: len(seen) != 1 or not any(Streams.of(worker).left().values()))
    return seen, worker.engine.stats()["running_requests"]


def through(call: rpc.InterceptedCall, proceed: rpc.Proceed) -> object:
    return proceed(call)


BEGIN: dict[str, Callable[[torch.Tensor], object]] = {
    "rpc_async": lambda x: rpc.rpc_async("w1", record, (x,), timeout=0),
    "map": lambda x: list(rpc.map("w1", record, [x], timeout=0)),
    "stream": lambda x: rpc.stream("w1", record_items, (x,), timeout=0),
}


def _sends_to_a_stopped_process(rank: int, n: int, init_method: str, what: str, intercepted: bool) -> Any:
    options = rpc.Options(init_method=init_method, transports=("unix",))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    result = None
    if rank == 0:
        x = torch.zeros(LARGE // 4)
        pid = rpc.rpc_sync("w1", os.getpid)

        def on_signal(*_: object) -> None:
            raise Timer

        signal.signal(signal.SIGALRM, on_signal)
        if intercepted:
            rpc.intercept(client=through)
        stop(pid)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            BEGIN[what](x)
        except Timer:
            resume(pid)
            result = rpc.rpc_sync("w1", report, (x,))  # arrives after the large request before it
    rpc.shutdown()
    return result


@pytest.mark.parametrize("intercepted", [False, True])
@pytest.mark.parametrize("what", BEGIN)
def test_a_request_in_transmission_is_canceled(what: str, intercepted: bool) -> None:
    with Processes(2, _sends_to_a_stopped_process, what, intercepted, method="forkserver") as group:
        got, running = group.results()[0]
    assert got != ["runs"]
    assert running == 1  # the report

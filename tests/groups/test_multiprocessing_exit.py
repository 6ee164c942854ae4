"""Children of multiprocessing that exit with a worker.

The worker ends after the program's own `atexit` handlers, with a goodbye message.
"""

import atexit
import queue
import sys
import threading
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.testing import processes

METHODS = ["fork", "forkserver", "spawn"]
HANDLERS_RUN = METHODS if sys.version_info >= (3, 13) else ["spawn"]  # before 3.13 forked children end with os._exit
TIMEOUT = 40.0  # s


_heard: "queue.Queue[str]" = queue.Queue()
_called = threading.Event()


def join(rank: int, n: int, init_method: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))


@rpc.functions.async_execution
def never_completed() -> Any:
    _called.set()
    return torch.futures.Future()


def record(text: str) -> None:
    _heard.put(text)


def report(text: str) -> None:
    rpc.rpc_sync("w0", record, (text,), timeout=TIMEOUT)


def shut_down_at_exit(rank: int, n: int, init_method: str) -> str:
    join(rank, n, init_method)
    if rank == 0:
        text = _heard.get(timeout=TIMEOUT)
        rpc.shutdown(timeout=TIMEOUT)
        return text
    atexit.register(rpc.shutdown, timeout=TIMEOUT)
    atexit.register(report, "its handlers run, and it can call")
    return ""


def end_without_shutdown(rank: int, n: int, init_method: str) -> bool:
    join(rank, n, init_method)
    if rank == 1:
        assert _called.wait(TIMEOUT)
        return True
    with pytest.raises(WorkerLost) as lost:
        rpc.rpc_sync("w1", never_completed, timeout=TIMEOUT)
    return lost.value.left


@pytest.mark.parametrize("method", HANDLERS_RUN)
def test_the_worker_is_usable_in_atexit_handlers(method: str) -> None:
    assert processes(2, shut_down_at_exit, method=method) == ["its handlers run, and it can call", ""]


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_without_a_shutdown_says_goodbye(method: str) -> None:
    assert processes(2, end_without_shutdown, method=method) == [True, True]

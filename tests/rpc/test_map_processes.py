"""`rpc.map` over processes."""

import os
import signal
from typing import Any

from telegrad import rpc
from telegrad.testing import Processes


def killed(x: int) -> int:
    if rpc.get_worker_info().name == "w1" and x > 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def _maps_past_a_kill(rank: int, n: int, init_method: str) -> Any:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.Options(init_method=init_method))
    if rank:
        rpc.shutdown()
        return None
    got = list(rpc.map(["w1", "w2"], killed, range(5000), retry=1))
    rpc.shutdown()
    return got


def test_a_killed_process() -> None:
    with Processes(3, _maps_past_a_kill, method="forkserver") as group:
        got, _ = group.results(ranks=(0, 2))
    assert got == list(range(5000))

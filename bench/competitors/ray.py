"""Ray: every worker is an actor.

Worker 0 measures inside its actor, so it can be called.
"""

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.competitors.base import Client, Competitor, Main, Seat, take_seat
from bench.functions import TABLE

ROOT = Path(__file__).parents[2]
THREADS = 16
STORE_BYTES = 4 << 30


class RayClient(Client):
    def __init__(self, rank: int, handles: Sequence[Any], leader: int) -> None:
        import ray

        self._ray, self._handles = ray, list(handles)
        self.rank, self.workers, self.leader = rank, len(handles), leader

    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        get, method = self._ray.get, getattr(self._handles[rank], function.__name__)
        return lambda: get(method.remote(*args))

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return getattr(self._handles[rank], function.__name__).remote(*args)

    def collect(self, begun: Sequence[Any]) -> list[Any]:
        results: list[Any] = self._ray.get(list(begun))
        return results

    def method(self, rank: int, cls: type, name: str, *args: Any) -> Callable[[], Any]:
        get, method = self._ray.get, getattr(self._ray.remote(num_cpus=0)(cls).remote(), name)
        return lambda: get(method.remote(*args))

    def leave(self) -> None:
        pass

    def serve(self, lifeline: int) -> None:
        raise AssertionError("actors need no serve()")


class Worker:
    """The actor; it has a method for each function."""

    def meet(self, rank: int, handles: Sequence[Any], leader: int) -> None:
        torch.set_num_threads(1)
        take_seat(RayClient(rank, handles, leader))

    def measure(self, main: bytes) -> None:
        from bench.competitors.base import here

        pickle.loads(main)(here())


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _self, *args: function(*args)


for _name, _function in TABLE.items():
    setattr(Worker, _name, _method(_function))


class Ray(Competitor):
    name, package, distribution, spans_hosts = "Ray", "ray", "ray", False
    about = "Ray actors; ray.get(actor.method.remote(...)); a worker is called by one thread where nothing needs more"

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        os.environ |= {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        import ray

        with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
            ray.init(
                num_cpus=len(seats),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=STORE_BYTES,
                _temp_dir=folder,
            )
            actor: Any = ray.remote(num_cpus=0)(Worker)
            # A thread pool makes calls slower, so an actor that makes no calls has none.
            threads = [THREADS if seat.rank == 0 or seat.workers > 2 else 1 for seat in seats]
            handles: list[Any] = [actor.options(max_concurrency=count).remote() for count in threads]
            ray.get([handle.meet.remote(rank, handles, os.getpid()) for rank, handle in enumerate(handles)])
            ray.get(handles[0].measure.remote(pickle.dumps(main)))
            ray.shutdown()

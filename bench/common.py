"""What the benchmarks share: groups of processes over either package, functions to call, figures about machines."""

import importlib
import json
import math
import os
import platform
import socket
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing as mp

MODULES = {"torch": "torch.distributed.rpc", "telegrad": "telegrad.rpc"}
SERVER = "server"  # the name of the worker that the benchmarks call


def identity(value: Any) -> Any:
    return value


class Counter:
    """A remote object with the cheapest method there is."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total


def in_group(package: str, measure: Callable[..., Any], *args: Any, workers: int = 2) -> Any:
    """Run `measure(rpc, *args)` in the first of fresh processes that `package` connects; return what it returns.

    The others (see `name_of`) only serve. All use one thread per operation. `measure` is a function of a module, its
    result is made of what JSON knows, and what it raises comes out of here. All processes have ended when this returns.
    """
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        mp.spawn(_member, args=(package, measure, args, result, workers), nprocs=workers)
        return json.loads(result.read_text())


def name_of(rank: int) -> str:
    """Names of workers: the one that measures, the one that the benchmarks call, and further ones."""
    return ("client", SERVER)[rank] if rank < 2 else f"worker{rank}"


def _member(
    rank: int, package: str, measure: Callable[..., Any], args: tuple[Any, ...], result: Path, workers: int
) -> None:
    warnings.showwarning = _say_nothing  # torch's RPC and its optimizer announce at every start that they are old
    torch.set_num_threads(1)
    rpc: ModuleType = importlib.import_module(MODULES[package])
    rpc.init_rpc(name_of(rank), rank=rank, world_size=workers)
    if rank == 0:
        result.write_text(json.dumps(measure(rpc, *args)))
    rpc.shutdown()


def _say_nothing(*_: object, **__: object) -> None:
    pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def p99(samples: list[float]) -> float:
    """The smallest sample that at least 99 % of them do not exceed; with fewer than 100, the largest."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def summary(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile in the unit of the samples, and how many there were."""
    return {"median": statistics.median(samples), "p99": p99(samples), "samples": len(samples)}


def machine() -> dict[str, Any]:
    """What a reader must know to compare figures."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

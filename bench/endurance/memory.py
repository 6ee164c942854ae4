"""Resources after many calls, and the CPU time of an idle worker.

Exits with status 1 if a goal is missed. Both processes of a group are measured after a warm-up and again after the
calls, each time after a pause in which unused threads exit: resident memory, open files, threads, owned references and
buffers in use. The CPU time of another pause is the cost of an idle worker.
"""

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.competitors.base import Client
from bench.competitors.table import COMPETITORS
from bench.functions import Counter, identity
from bench.groups import run_in_group
from bench.machine import machine
from bench.processes import nothing_left_behind
from bench.row import OURS, TORCH
from bench.training import SERVER

IN_FLIGHT = 100
MEMORY_GOAL = 0.05  # the growth of resident memory that is allowed
IDLE_GOAL = 0.001  # of one core

Figures = dict[str, float]


def measure_resources(package: str) -> Figures:
    """Return the resources that a package (telegrad or torch.distributed) uses."""
    gc.collect()
    api = importlib.import_module(f"{package}.rpc.api")
    process = psutil.Process()
    figures = {
        "resident MB": process.memory_info().rss / 1e6,
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "references owned": int(api._rref_context_get_debug_info()["num_owner_rrefs"]),
    }
    if package == "telegrad":
        figures["buffers in use"] = api._get_current_rpc_agent().worker.engine.stats()["live_blocks"]
    return figures


def work(rpc: ModuleType, calls: int) -> None:
    """Make at least `calls` calls of every kind.

    They are blocking or in flight together, on functions or references, with and without tensors.
    """
    small, large = torch.ones(2), torch.ones(1 << 16)
    for number in range(-(-calls // (IN_FLIGHT + 6))):
        futures = [rpc.rpc_async(SERVER, identity, args=(i,)) for i in range(IN_FLIGHT)]
        torch.futures.wait_all(futures)
        rpc.rpc_sync(SERVER, identity, args=(number,))
        rpc.rpc_sync(SERVER, identity, args=({"small": small, "name": str(number)},))
        rpc.rpc_sync(SERVER, torch.add, args=(small, number))
        rpc.rpc_sync(SERVER, identity, args=(large,))
        counter = rpc.remote(SERVER, Counter)
        counter.rpc_sync().add(1)


def measure(client: Client, calls: int, pause: float) -> dict[str, dict[str, Any]]:
    """Measure client and server. Runs in the client.

    Returns:
        `{process: {"before": figures, "after": figures, "idle": share of a core}}`.
    """
    rpc, package = client.rpc, client.rpc_parent
    assert rpc is not None

    def both(func: Callable[..., Any], *args: str) -> dict[str, Any]:
        time.sleep(pause)
        return {"client": func(*args), "server": rpc.rpc_sync(SERVER, func, args=args)}

    work(rpc, max(calls // 10, 1))  # memory pools, caches and threads reach their working size
    before = both(measure_resources, package)
    work(rpc, calls)
    after = both(measure_resources, package)
    start = {"client": time.process_time(), "server": rpc.rpc_sync(SERVER, time.process_time)}
    end = both(time.process_time)
    return {
        name: {"before": before[name], "after": after[name], "idle": (end[name] - start[name]) / pause}
        for name in before
    }


def verdicts(figures: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return the rows of a process: name, before, after, whether the goal is met."""
    before, after = figures["before"], figures["after"]
    rows = []
    for label, held in before.items():
        allowed = held * (1 + MEMORY_GOAL) if label == "resident MB" else held
        rows.append((label, f"{held:.0f}", f"{after[label]:.0f}", after[label] <= allowed))
    rows.append(("idle, share of a core", "", f"{figures['idle']:.3%}", figures["idle"] < IDLE_GOAL))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", choices=(OURS, TORCH), default=OURS)
    parser.add_argument("--calls", type=int, default=100_000, metavar="N", help="calls to make (default 100,000)")
    parser.add_argument(
        "--pause", type=float, default=12.0, metavar="SECONDS", help="length of each of the three pauses (default 12)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to PATH")
    args = parser.parse_args()
    if args.calls < 1 or args.pause <= 0:
        parser.error("calls and pause must be positive")

    timeout = 60 + args.calls / 50 + 4 * args.pause
    with nothing_left_behind():
        processes: dict[str, dict[str, Any]] = run_in_group(
            COMPETITORS[args.package], 2, measure, args.calls, args.pause, seconds=timeout
        )
    table = Table(title=f"{args.package}: {args.calls:,} calls, then {args.pause:g} s without one")
    for heading in ("process", "", "before", "after", "goal"):
        table.add_column(heading, justify="right" if heading in ("before", "after") else "left")
    met = True
    for name, figures in processes.items():
        for label, before, after, good in verdicts(figures):
            table.add_row(name, label, before, after, "[green]met[/]" if good else "[red]missed[/]")
            met &= good
    Console(highlight=False).print(table)
    if args.json:
        result: dict[str, Any] = {"machine": machine(), "package": args.package, "calls": args.calls, "met": met}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result | {"processes": processes}, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""Memory after many autograd contexts. Exits with status 1 if it has grown."""

import argparse
import gc
import json
import sys
from pathlib import Path

import psutil
import torch

from bench.competitors.base import Client
from bench.competitors.table import COMPETITORS
from bench.groups import run_in_group
from bench.machine import machine
from bench.processes import nothing_left_behind
from bench.row import OURS, TORCH
from bench.rows.autograd import one_pass
from bench.training import SERVER, Clock, Framework, as_is

MEMORY_GOAL = 0.05  # growth of resident memory over all contexts

Held = dict[str, dict[str, float]]


def open_and_close(client: Client, count: int) -> Held:
    """Open and close contexts, one in a hundred with a pass over a call.

    Returns the resources before and after.
    """
    framework = Framework(client.rpc_parent)
    x = torch.rand(4, requires_grad=True)
    step = one_pass(framework, x, lambda: framework.rpc.rpc_sync(SERVER, as_is, args=(x,)))

    def run(times: int) -> None:
        for number in range(times):
            if number % 100:
                with framework.autograd.context():
                    pass
            else:
                step(Clock())

    def held() -> dict[str, float]:
        return {"client": resident(), "server": framework.rpc.rpc_sync(SERVER, resident)}

    run(max(count // 10, 100))
    before = held()
    run(count)
    after = held()
    return {name: {"before": before[name], "after": after[name]} for name in before}


def resident() -> float:
    """Return the resident megabytes of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", choices=(OURS, TORCH), default=OURS)
    parser.add_argument("--count", type=int, default=100_000, metavar="N", help="contexts (default 100,000)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to PATH")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("there is nothing to measure")
    with nothing_left_behind():
        found: Held = run_in_group(
            COMPETITORS[args.package], 2, open_and_close, args.count, seconds=120 + args.count / 100
        )
    good = True
    for name, memory in found.items():
        print(f"{args.count:,} contexts, {name}: {memory['before']:.0f} MB before, {memory['after']:.0f} MB after")
        good &= memory["after"] <= memory["before"] * (1 + MEMORY_GOAL)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "contexts": found, "good": good}, indent=2) + "\n")
    if not good:
        print("the goal is missed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

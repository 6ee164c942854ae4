"""Run checked work in processes, with faults.

For example: python -m bench.soak --minutes 30 --seed 1

Exits with 1 if a result is wrong, a call or a worker is lost without a fault, or a resource grows.
"""

import argparse
import json
import random
import secrets
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.machine import machine
from bench.soak.faults import HEARTBEAT, Faults
from bench.soak.group import Group
from bench.soak.ledger import Ledger
from bench.soak.resources import Sample, growth, sample
from telegrad import _core

STAYING = ("s0", "s1")
CHANGING = ("c0", "c1")
SAMPLES = 200  # of each process over a run


def options(chooser: random.Random) -> dict[str, Any]:
    secret = secrets.token_hex(16) if _core.openssl_version() and chooser.random() < 0.5 else None
    return {
        "secret": secret,
        "heartbeat": HEARTBEAT,
        "local_heartbeat": HEARTBEAT,
        "member_lease": 3 * HEARTBEAT,
        "rpc_timeout": 20,
        "num_worker_threads": 8,
    }


def run(seconds: float, seed: int, threads: int) -> dict[str, Any]:
    """Run the soak and return its figures."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    ledger = Ledger()
    chosen = options(random.Random(f"{seed} options"))
    group = Group(seed, f"tcp://127.0.0.1:{store.port}", chosen, ledger, threads)
    samples: dict[str, list[Sample]] = {name: [] for name in STAYING}
    trouble = ""
    left: dict[str, str] = {}
    try:
        group.join("s0", ("shm", "unix", "tcp"))
        group.join("s1", ("tcp",))
        for name in CHANGING:
            group.join(name)
        faults = Faults(seed, group, STAYING, CHANGING)
        begun = time.monotonic()
        faults.begin()
        pause = threading.Event()
        while time.monotonic() - begun < seconds and not faults.failed:
            pause.wait(seconds / SAMPLES)
            for name, found in samples.items():
                handle = group.members[name]
                found.append(sample(handle.pid, time.monotonic() - begun, handle.in_use))
        try:
            faults.end()
            left = group.end()
        except RuntimeError as e:
            trouble = str(e)
    finally:
        group.close()
    grown = {name: growth(found) for name, found in samples.items()}
    figures = {
        "seed": seed,
        "seconds": round(seconds),
        "encrypted": chosen["secret"] is not None,
        "machine": machine(),
        **ledger.as_json(),
        "joins": len(group.joins),
        "slowest join s": round(max(group.joins), 2),
        "resources": {name: {key: one.as_json() for key, one in found.items()} for name, found in grown.items()},
        "memory MB over time": {name: [round(one.memory) for one in found[::10]] for name, found in samples.items()},
        "heap MB over time": {name: [round(one.heap, 1) for one in found[::10]] for name, found in samples.items()},
        "left behind": left,
        "trouble": trouble,
    }
    figures["passed"] = not any(
        figures[key] for key in ("wrong", "lost", "false losses", "other failures", "left behind", "trouble")
    ) and all(one.is_flat for found in grown.values() for one in found.values())
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1, help="of operations and faults")
    parser.add_argument("--threads", type=int, default=2, help="that work, per member")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    figures = run(args.minutes * 60, args.seed, args.threads)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

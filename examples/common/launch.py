"""Start of an example's processes on one machine, and the common options."""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NoReturn

import torch
import torch.multiprocessing as mp

RunWorker = Callable[[int, argparse.Namespace], bool]


def arguments(doc: str | None, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser with `--out`, `--seed` and `--smoke`.

    `doc` is the example's docstring, which `--help` shows. `defaults` are attributes of the arguments without an
    option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(__file__).parents[1] / "out"
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="folder of the figure (examples/out)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data order (default 1)")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to check within seconds that it works")
    parser.set_defaults(**defaults)
    return parser


def launch(run_worker: RunWorker, world_size: int, args: argparse.Namespace) -> NoReturn:
    """Run `run_worker(rank, args)` in `world_size` new processes, and exit.

    The processes meet on this machine, at the port MASTER_PORT if that is set. The exit status is 0 if every process
    returned True, and 1 if one returned False. A process that raises ends the others, and this one raises its error.
    """
    # The children inherit these. `init_rpc` meets at the first two, as torch's `init_process_group` does.
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: SimpleQueue[bool] = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(_process, args=(run_worker, args, results), nprocs=world_size)
    except KeyboardInterrupt:
        sys.exit(130)
    reached = [results.get() for _ in range(world_size)]
    sys.exit(0 if all(reached) else 1)


def join(run_worker: RunWorker, args: argparse.Namespace) -> NoReturn:
    """Run `run_worker(args.rank, args)` in this process, and exit.

    The group meets at `args.master_addr`, `args.master_port`.
    """
    os.environ.update(MASTER_ADDR=args.master_addr, MASTER_PORT=args.master_port)
    sys.exit(0 if _seeded(args.rank, run_worker, args) else 1)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def _process(rank: int, run_worker: RunWorker, args: argparse.Namespace, results: "SimpleQueue[bool]") -> None:
    torch.set_num_threads(1)  # the tensors are small, and there are more processes than cores
    try:
        results.put(_seeded(rank, run_worker, args))
    except KeyboardInterrupt:
        sys.exit(130)


def _seeded(rank: int, run_worker: RunWorker, args: argparse.Namespace) -> bool:
    torch.manual_seed(args.seed + rank)
    return run_worker(rank, args)

"""Test the installed wheel: load the core, and call a function of another process."""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import shutil
import socket
import sys

import telegrad
import telegrad._core

RANKS = ("caller", "callee")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(rank: int) -> None:
    import torch

    from telegrad import rpc

    rpc.init_rpc(RANKS[rank], rank=rank, world_size=len(RANKS))
    if rank == 0:
        there, total = (
            rpc.rpc_sync("callee", f, args) for f, args in ((os.getpid, ()), (torch.add, (torch.ones(2), 3)))
        )
        assert there != os.getpid()
        assert total.tolist() == [4.0, 4.0], total
    rpc.shutdown()


def main() -> None:
    for module in (telegrad, telegrad._core):
        assert pathlib.Path(str(module.__file__)).is_relative_to(sys.prefix), module.__file__
    assert importlib.metadata.version("telegrad") == telegrad.__version__
    assert (pathlib.Path(str(telegrad.__file__)).parent / "py.typed").exists()
    assert shutil.which("c++") is None, "the wheel must be tested without a compiler"
    tried = "the core loads"
    if importlib.util.find_spec("torch"):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        context = multiprocessing.get_context("fork")  # this program may be read from standard input
        callee = context.Process(target=run, args=(1,))
        callee.start()
        run(0)
        callee.join(60)
        assert callee.exitcode == 0, f"the callee ended with {callee.exitcode}"
        tried = "two processes called each other"
    print(f"telegrad {telegrad.__version__} on Python {platform.python_version()}, from its wheel: {tried}")


if __name__ == "__main__":
    main()

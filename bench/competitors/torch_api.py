"""Competitors with the names of torch.distributed.rpc: that itself, and Telegrad."""

import importlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from bench.competitors.base import Client, Seat
from bench.competitors.forked import ForkedCompetitor

TIMEOUT = 600.0  # seconds; the default of a minute is short for 200 operations on 400 MB on a busy machine


def name_of(rank: int) -> str:
    return f"worker{rank}"


class TorchApiClient(Client):
    rpc: ModuleType

    def __init__(self, rpc: ModuleType, seat: Seat) -> None:
        self.rpc, self.rank, self.workers = rpc, seat.rank, seat.workers
        self.rpc_parent = rpc.__name__.rpartition(".")[0]

    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        rpc_sync, name = self.rpc.rpc_sync, name_of(rank)
        return lambda: rpc_sync(name, function, args=args)

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc.rpc_async(name_of(rank), function, args=args)

    def collect(self, begun: Sequence[Any]) -> list[Any]:
        return torch.futures.wait_all(list(begun))

    def method(self, rank: int, cls: type, name: str, *args: Any) -> Callable[[], Any]:
        reference = self.rpc.remote(name_of(rank), cls)
        return lambda: getattr(reference.rpc_sync(), name)(*args)

    def leave(self) -> None:
        self.rpc.shutdown()

    def serve(self, lifeline: int) -> None:
        self.rpc.shutdown()  # which waits for worker 0


class TorchApiCompetitor(ForkedCompetitor):
    module: str

    @abstractmethod
    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        """Return the `rpc_backend_options` of `init_rpc`, with `TIMEOUT`."""

    def prepare(self) -> None:
        importlib.import_module(self.module)

    def join(self, seat: Seat) -> Client:
        rpc = importlib.import_module(self.module)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = seat.address(0), str(seat.port)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if seat.places:  # torch would look its own host name up
            for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
                os.environ[variable] = seat.places[seat.rank].interface
        warnings.simplefilter("ignore")  # torch's RPC announces at every start that it is old
        torch.set_num_threads(1)
        options = self.options(rpc, seat)
        rpc.init_rpc(name_of(seat.rank), rank=seat.rank, world_size=seat.workers, rpc_backend_options=options)
        return TorchApiClient(rpc, seat)

"""Telegrad, as it comes and over each of its transports."""

from types import ModuleType
from typing import Any

from bench import functions
from bench.peers.base import Client, Seat
from bench.peers.torch_api import TIMEOUT, TorchApiPeer
from bench.row import OURS


class Telegrad(TorchApiPeer):
    name, about, module = OURS, "as it comes; TCP between network namespaces", "telegrad.rpc"

    def __init__(self, *transports: str) -> None:
        """By default those that it comes with; between network namespaces always TCP."""
        self._transports = transports

    def join(self, seat: Seat) -> Client:
        client = super().join(seat)
        assert client.rpc is not None
        functions.allocate = client.rpc.empty
        return client

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        from telegrad.options import Options

        options = Options(rpc_timeout=TIMEOUT)
        transports = ("tcp",) if seat.places else self._transports
        if transports:
            options.transports = transports
        return options

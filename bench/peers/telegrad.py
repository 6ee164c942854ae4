"""Telegrad."""

from types import ModuleType
from typing import Any

from bench.peers.base import Seat
from bench.peers.torch_api import TIMEOUT, TorchApiPeer
from bench.row import OURS


class Telegrad(TorchApiPeer):
    name, about, module = OURS, "as it comes; TCP between network namespaces", "telegrad.rpc"

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        from telegrad.options import Options

        return Options(rpc_timeout=TIMEOUT, **{"transports": ("tcp",)} if seat.places else {})

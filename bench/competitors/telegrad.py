"""Telegrad, by default and over each of its transports."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from bench import functions
from bench.competitors.base import Client, Seat
from bench.competitors.torch_api import TIMEOUT, TorchApiClient, TorchApiCompetitor, name_of
from bench.row import OURS


class TelegradClient(TorchApiClient):
    def begin_all(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        return list(self.rpc.multicast([name_of(rank) for rank in ranks], function, args=args))

    def collect(self, begun: Sequence[Any]) -> list[Any]:
        return list(self.rpc.wait_all(begun))


class Telegrad(TorchApiCompetitor):
    name, about, module = OURS, "default options; TCP between network namespaces", "telegrad.rpc"

    def __init__(self, *transports: str) -> None:
        """Restrict the transports; between network namespaces it is always TCP."""
        self._transports = transports

    def join(self, seat: Seat) -> Client:
        joined = super().join(seat)
        assert joined.rpc is not None
        functions.allocate = joined.rpc.empty
        return TelegradClient(joined.rpc, seat)

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        from telegrad.options import Options

        options = Options(rpc_timeout=TIMEOUT)
        transports = ("tcp",) if seat.places else self._transports
        if transports:
            options.transports = transports
        return options

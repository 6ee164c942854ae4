"""Telegrad, by default and over each of its transports."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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

    def __init__(self, *transports: str, secret: str | None = None) -> None:
        """Restrict the transports, and encrypt TCP if there is a secret.

        Between network namespaces the transport is always TCP.
        """
        self._transports = transports
        self._secret = secret

    def join(self, seat: Seat) -> Client:
        joined = super().join(seat)
        assert joined.rpc is not None
        functions.allocate = joined.rpc.empty
        return TelegradClient(joined.rpc, seat)

    def options(self, rpc: ModuleType, seat: Seat) -> Any:
        from telegrad.options import Options

        options = Options(rpc_timeout=TIMEOUT, secret=self._secret)
        transports = ("tcp",) if seat.places else self._transports
        if transports:
            options.transports = transports
        return options


class Parent(Telegrad):
    """Another checkout of Telegrad with a compiled core (`make build`)."""

    name = "parent"

    def __init__(self, checkout: Path) -> None:
        super().__init__()
        self.source = checkout / "src"
        self.about = f"Telegrad of {checkout}"
        if not list(self.source.glob("telegrad/_core*.so")):
            raise FileNotFoundError(f"{checkout} has no compiled Telegrad: run `make build` there")

    def prepare(self) -> None:
        self._select()
        super().prepare()

    def join(self, seat: Seat) -> Client:
        self._select()
        return super().join(seat)

    def _select(self) -> None:
        if not any(isinstance(finder, _FindIn) for finder in sys.meta_path):
            sys.meta_path.insert(0, _FindIn(self.source))  # before the finder of an editable installation
        import telegrad

        if not Path(telegrad.__file__).is_relative_to(self.source):
            raise RuntimeError(f"imported {telegrad.__file__} instead of the Telegrad in {self.source}")


class _FindIn(MetaPathFinder):
    """Finder of Telegrad's modules in one folder."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "telegrad":
            return None
        return PathFinder.find_spec(name, [self.source] if path is None else path, target)

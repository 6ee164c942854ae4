"""Interface of a competitor: connects processes, with a client in each of them.

To add a competitor, write a class with the members of `Competitor` in a file of this folder, and add it to
`COMPETITORS`.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

Main = Callable[["Client"], object]

HOST = "127.0.0.1"


class Unsupported(Exception):
    """A competitor does not support an operation. The text names it, for the table."""


@dataclass(frozen=True)
class Place:
    """Network location of a worker: namespace, address and interface. See networks.py."""

    namespace: int  # the pid of a process that is in it
    address: str
    interface: str


@dataclass(frozen=True)
class Seat:
    """Parameters of a worker in a group."""

    rank: int
    workers: int
    port: int  # free port of the first worker
    folder: Path  # of this group alone, for sockets and other files
    places: tuple[Place, ...] = ()  # one for each worker; empty: all use loopback

    def address(self, rank: int) -> str:
        return self.places[rank].address if self.places else HOST


class Client(ABC):
    """Worker of a group, for the rows: its rank, and calls of the other workers."""

    rank: int
    workers: int
    leader: int  # pid of the process that all processes of the group descend from
    rpc: ModuleType | None = None  # torch.distributed.rpc or a module with its names
    rpc_parent: str = ""  # the package that it is in

    @abstractmethod
    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Return a repeatable blocking call, as a user of this competitor would write it."""

    @abstractmethod
    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Start a call."""

    def begin_all(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Start the same call on several workers, as a user of this competitor would."""
        return [self.begin(rank, function, *args) for rank in ranks]

    @abstractmethod
    def collect(self, begun: Sequence[Any]) -> list[Any]:
        """Return the results of started calls."""

    def method(self, rank: int, cls: type, name: str, *args: Any) -> Callable[[], Any]:
        """Create an object on a worker and return a blocking call of its method."""
        raise Unsupported("has no remote objects")

    @abstractmethod
    def leave(self) -> None:
        """Leave the group. Called by worker 0."""

    @abstractmethod
    def serve(self, lifeline: int) -> None:
        """Serve until worker 0 leaves. Called by the other workers.

        `lifeline` reaches its end of file when worker 0 has ended.
        """


class Competitor(ABC):
    """Framework that calls functions in other processes."""

    name: str
    about: str
    package: str = ""  # import name, unless it is a part of PyTorch
    distribution: str = ""  # package name; tools/install_competitors.sh
    spans_hosts: bool = True  # can connect workers of different network namespaces, here

    def missing(self) -> str | None:
        """Return why the competitor cannot be measured on this machine; None if it can."""
        if not self.package or find_spec(self.package) is not None:
            return None
        log = Path(sys.prefix, "competitors", f"{self.distribution}.log")
        output = log.read_text().splitlines() if log.exists() else []
        errors = [line for line in output if line.startswith("ERROR")] or output
        return f"{self.distribution} is not installed: {errors[-1] if errors else 'make bench installs it'}"

    @abstractmethod
    def run(self, seats: Sequence[Seat], main: Main) -> None:
        """Connect processes, run `main` in worker 0, and end them. For the group's leader."""


_here: Client | None = None


def here() -> Client:
    """Return the client of this process."""
    if _here is None:
        raise RuntimeError("this process is not part of a group")
    return _here


def take_seat(client: Client) -> Client:
    global _here
    _here = client
    return client

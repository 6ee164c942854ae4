"""What a peer is to the rows: a way to connect processes, and in each of them a client that calls the others.

To add a peer, write a class with the members of `Peer` in a file of this folder, and add it to `PEERS`.
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
    """A peer has no such thing. The text says what, for the table."""


@dataclass(frozen=True)
class Place:
    """Where a worker stands in the network: in a namespace, behind an interface. See networks.py."""

    namespace: int  # the pid of a process that is in it
    address: str
    interface: str


@dataclass(frozen=True)
class Seat:
    """What a worker must know to take part."""

    rank: int
    workers: int
    port: int  # a free one, of the first worker
    folder: Path  # of this group alone, for sockets and the like
    places: tuple[Place, ...] = ()  # one for each worker; none: all in the same, with loopback

    def address(self, rank: int) -> str:
        return self.places[rank].address if self.places else HOST


class Client(ABC):
    """One worker of a group, for the rows: its rank, and how it calls the others."""

    rank: int
    workers: int
    leader: int  # the pid of the process whose descendants are all that the group consists of
    rpc: ModuleType | None = None  # torch.distributed.rpc or what has its names
    rpc_parent: str = ""  # the package that it is in

    @abstractmethod
    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """A blocking call, as a user of this peer would write it, ready to be made again and again."""

    @abstractmethod
    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Starts a call."""

    def begin_all(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Starts the same call on several workers, as a user of this peer would."""
        return [self.begin(rank, function, *args) for rank in ranks]

    @abstractmethod
    def collect(self, begun: Sequence[Any]) -> list[Any]:
        """The results of started calls."""

    def method(self, rank: int, cls: type, name: str, *args: Any) -> Callable[[], Any]:
        """A blocking call of a method of an object that is made on a worker now."""
        raise Unsupported("has no remote objects")

    @abstractmethod
    def leave(self) -> None:
        """The end, for worker 0."""

    @abstractmethod
    def serve(self, lifeline: int) -> None:
        """What the others do: serve until worker 0 leaves, and end. `lifeline` is at its end when worker 0 is gone."""


class Peer(ABC):
    """One way to call functions in other processes."""

    name: str
    about: str
    package: str = ""  # what it is imported as, if that is not a part of PyTorch
    distribution: str = ""  # what it is installed as; tools/install_peers.sh
    spans_hosts: bool = True  # can connect workers of different network namespaces, here

    def missing(self) -> str | None:
        """Why it cannot be measured on this machine; None: it can."""
        if not self.package or find_spec(self.package) is not None:
            return None
        log = Path(sys.prefix, "peers", f"{self.distribution}.log")
        said = log.read_text().splitlines() if log.exists() else []
        errors = [line for line in said if line.startswith("ERROR")] or said
        return f"{self.distribution} is not installed: {errors[-1] if errors else 'make bench installs it'}"

    @abstractmethod
    def run(self, seats: Sequence[Seat], main: Main) -> None:
        """Connects processes, runs `main` in worker 0, and ends them. Runs in the process that leads the group."""


_here: Client | None = None


def here() -> Client:
    """The client of this process."""
    if _here is None:
        raise RuntimeError("this process is not part of a group")
    return _here


def take_seat(client: Client) -> Client:
    global _here
    _here = client
    return client

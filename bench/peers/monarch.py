"""Monarch: worker 0 is the process that controls the others, each of which is an actor in a process of its own."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.functions import TABLE
from bench.peers.base import Client, Main, Peer, Seat, Unsupported, take_seat

ROOT = Path(__file__).parents[2]


class MonarchClient(Client):
    """Of worker 0. The actors of the others have no client, so they call nobody."""

    rank = 0

    def __init__(self, actors: Any, workers: int, spawn: Callable[[type], Any]) -> None:
        self._actors = [None, *(actors.slice(workers=i) for i in range(workers - 1))]
        self.workers, self.leader = workers, os.getpid()
        self._spawn = spawn

    def _endpoint(self, rank: int, function: Callable[..., Any]) -> Any:
        if function.__name__ in ("back", "exchange", "hammer"):
            raise Unsupported("this bench gives its actors nobody to call")
        return getattr(self._actors[rank], function.__name__)

    def caller(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        call = self._endpoint(rank, function).call_one
        return lambda: call(*args).get()

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._endpoint(rank, function).call_one(*args)

    def collect(self, begun: Sequence[Any]) -> list[Any]:
        return [one.get() for one in begun]

    def method(self, rank: int, cls: type, name: str, *args: Any) -> Callable[[], Any]:
        call = getattr(self._spawn(actor_of(cls, name)).slice(workers=rank - 1), name).call_one
        return lambda: call(*args).get()

    def leave(self) -> None:
        pass

    def serve(self, lifeline: int) -> None:
        raise AssertionError("actors serve by themselves")


def _actor(name: str, members: dict[str, Any]) -> type:
    from monarch.actor import Actor

    return type(name, (Actor,), {"__module__": __name__} | members)


def _endpoint(name: str, function: Callable[..., Any]) -> Any:
    from monarch.actor import endpoint

    function.__name__ = name
    return endpoint(function)


def actor_class() -> type:
    """An actor with an endpoint for each function."""

    def made(name: str, function: Callable[..., Any]) -> Any:
        return _endpoint(name, lambda _self, *args: function(*args))

    def __init__(self: Any) -> None:
        torch.set_num_threads(1)

    endpoints = {name: made(name, function) for name, function in TABLE.items()}
    return _actor("Worker", {"__init__": __init__} | endpoints)


def actor_of(cls: type, name: str) -> type:
    """An actor that holds an object, with an endpoint for one of its methods."""

    def __init__(self: Any) -> None:
        self.held = cls()

    return _actor(
        cls.__name__,
        {"__init__": __init__, name: _endpoint(name, lambda self, *args: getattr(self.held, name)(*args))},
    )


class Monarch(Peer):
    name, package, distribution, spans_hosts = "Monarch", "monarch", "torchmonarch", False
    about = "Monarch actors; actor.method.call_one(...).get()"

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": _path()}
        torch.set_num_threads(1)
        from monarch.actor import shutdown_context, this_host

        processes = this_host().spawn_procs(per_host={"workers": len(seats) - 1})
        actors = processes.spawn("bench", actor_class())
        main(take_seat(MonarchClient(actors, len(seats), lambda cls: processes.spawn(cls.__name__, cls))))
        shutdown_context().get()


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

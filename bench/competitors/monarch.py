"""Monarch: worker 0 controls the others, each an actor in its own process."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.competitors.base import Client, Competitor, Main, Seat, Unsupported, take_seat
from bench.functions import TABLE

ROOT = Path(__file__).parents[2]
CALLING = ("back", "exchange", "hammer")  # functions that call other workers


class MonarchClient(Client):
    """Client with two actors per process: one is called, the other calls.

    An actor does one thing at a time.
    """

    def __init__(self, rank: int, called: Sequence[Any], calling: Sequence[Any], spawn: Callable[[type], Any]) -> None:
        self.rank, self.workers, self.leader = rank, len(called), os.getpid()
        self._called, self._calling = called, calling
        self._spawn = spawn

    def _endpoint(self, rank: int, function: Callable[..., Any]) -> Any:
        actors = self._calling if function.__name__ in CALLING else self._called
        return getattr(actors[rank], function.__name__)

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
        raise AssertionError("actors need no serve()")


def _actor(name: str, members: dict[str, Any]) -> type:
    from monarch.actor import Actor

    return type(name, (Actor,), {"__module__": __name__} | members)


def _endpoint(name: str, function: Callable[..., Any]) -> Any:
    from monarch.actor import endpoint

    function.__name__ = name
    return endpoint(function)


def actor_class() -> type:
    """Create an actor class with an endpoint for each function."""

    def made(name: str, function: Callable[..., Any]) -> Any:
        return _endpoint(name, lambda _self, *args: function(*args))

    def __init__(self: Any) -> None:
        torch.set_num_threads(1)

    def meet(_self: Any, rank: int, called: Sequence[Any], calling: Sequence[Any]) -> None:
        take_seat(MonarchClient(rank, called, calling, _spawns_nothing))

    endpoints = {name: made(name, function) for name, function in TABLE.items()}
    return _actor("Worker", {"__init__": __init__, "meet": _endpoint("meet", meet)} | endpoints)


def _spawns_nothing(cls: type) -> Any:
    raise Unsupported("only worker 0 makes remote objects here")


def actor_of(cls: type, name: str) -> type:
    """Create an actor class that holds an object and serves one of its methods."""

    def __init__(self: Any) -> None:
        self.held = cls()

    return _actor(
        cls.__name__,
        {"__init__": __init__, name: _endpoint(name, lambda self, *args: getattr(self.held, name)(*args))},
    )


class Monarch(Competitor):
    name, package, distribution, spans_hosts = "Monarch", "monarch", "torchmonarch", False
    about = "Monarch actors; actor.method.call_one(...).get(); a process that calls has a second actor, which is called"

    def run(self, seats: Sequence[Seat], main: Main) -> None:
        os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": _path()}
        torch.set_num_threads(1)
        from monarch.actor import shutdown_context, this_host, this_proc

        others = len(seats) - 1
        processes = this_host().spawn_procs(per_host={"workers": others})
        cls = actor_class()
        called, calling = (
            [own, *(meshed.slice(workers=i) for i in range(others))]
            for own, meshed in ((this_proc().spawn(name, cls), processes.spawn(name, cls)) for name in ("a", "b"))
        )
        for rank in range(1, len(seats)):
            calling[rank].meet.call_one(rank, called, calling).get()
        main(take_seat(MonarchClient(0, called, calling, lambda cls: processes.spawn(cls.__name__, cls))))
        shutdown_context().get()


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

"""Values with observable deletion, and functions that run on workers."""

import threading
import weakref
from typing import Any

from telegrad.rpc import RRef, rpc_sync
from telegrad.testing import Gate

TIMEOUT = 20.0  # s; steps are short, but the machine may be busy

_starts: dict[str, threading.Event] = {}
_ends: dict[str, threading.Event] = {}
_alive: dict[str, "weakref.ref[Tracked]"] = {}


class Tracked:
    """Value on some worker; `freed` of its name is set at its deletion."""

    def __init__(self, name: str, content: Any = None) -> None:
        self.name = name
        self.content = content
        _ends[name] = end = threading.Event()
        _alive[name] = weakref.ref(self)
        weakref.finalize(self, end.set)
        started(name).set()

    def __reduce__(self) -> Any:
        return tuple, ((self.name,),)  # a copy would be confused with the value: it is sent as its name

    def greet(self, name: str) -> str:
        return f"{self.name} greets {name}"

    def fail(self) -> None:
        raise KeyError(self.name)

    def child(self, name: str) -> "Tracked":
        return Tracked(name)


def started(name: str) -> threading.Event:
    """Return the event that is set once a value of this name exists."""
    return _starts.setdefault(name, threading.Event())


def freed(name: str) -> threading.Event:
    """Return the event that is set once the value of this name is deleted."""
    return _ends[name]


def alive(name: str) -> bool:
    return _alive[name]() is not None


def make(name: str) -> Tracked:
    return Tracked(name)


def make_when_open(name: str, gate: Gate) -> Tracked:
    gate.enter()
    return Tracked(name)


def fail(text: str) -> None:
    raise LookupError(text)


def fail_when_open(text: str, gate: Gate) -> None:
    gate.enter()
    raise LookupError(text)


def ping() -> str:
    return "pong"


def own(name: str) -> RRef[Tracked]:
    """Return a reference to a new value of this worker."""
    return RRef(Tracked(name))


def own_when_open(name: str, gate: Gate) -> RRef[Tracked]:
    gate.enter()
    return RRef(Tracked(name))


def greet(rref: RRef[Tracked]) -> str:
    """Greet through a reference, local or remote."""
    result: str = rref.rpc_sync().greet("you")
    return result


def forward(rref: RRef[Tracked], *path: str) -> str:
    """Send a reference from worker to worker; the last one uses it."""
    if not path:
        return greet(rref)
    result: str = rpc_sync(path[0], forward, (rref, *path[1:]))
    return result


def is_here(rref: RRef[Tracked], name: str) -> bool:
    return rref.is_owner() and rref.local_value() is _alive[name]()

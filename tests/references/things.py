"""Values whose end can be waited for, and functions that run on workers."""

import threading
import weakref
from typing import Any

from telegrad.rpc import RRef, rpc_sync
from telegrad.testing import Gate

PATIENCE = 20.0  # s; nothing here takes long, but the machine may be busy

_starts: dict[str, threading.Event] = {}
_ends: dict[str, threading.Event] = {}
_alive: dict[str, "weakref.ref[Thing]"] = {}


class Thing:
    """A value on some worker. `freed` of its name is set when it goes."""

    def __init__(self, name: str, content: Any = None) -> None:
        self.name = name
        self.content = content
        _ends[name] = end = threading.Event()
        _alive[name] = weakref.ref(self)
        weakref.finalize(self, end.set)
        started(name).set()

    def __reduce__(self) -> Any:
        return tuple, ((self.name,),)  # a copy would be confused with the value: it travels as its name

    def greet(self, whom: str) -> str:
        return f"{self.name} greets {whom}"

    def fail(self) -> None:
        raise KeyError(self.name)

    def child(self, name: str) -> "Thing":
        return Thing(name)


def started(name: str) -> threading.Event:
    """Set when a value of this name has been made."""
    return _starts.setdefault(name, threading.Event())


def freed(name: str) -> threading.Event:
    """Set when the value of this name has gone."""
    return _ends[name]


def alive(name: str) -> bool:
    return _alive[name]() is not None


def make(name: str) -> Thing:
    return Thing(name)


def make_when_open(name: str, gate: Gate) -> Thing:
    gate.enter()
    return Thing(name)


def fail(text: str) -> None:
    raise LookupError(text)


def fail_when_open(text: str, gate: Gate) -> None:
    gate.enter()
    raise LookupError(text)


def ping() -> str:
    return "pong"


def own(name: str) -> RRef[Thing]:
    """A reference to a new value of the worker that runs this."""
    return RRef(Thing(name))


def own_when_open(name: str, gate: Gate) -> RRef[Thing]:
    gate.enter()
    return RRef(Thing(name))


def greet(rref: RRef[Thing]) -> str:
    """Wherever the value is."""
    result: str = rref.rpc_sync().greet("you")
    return result


def forward(rref: RRef[Thing], *path: str) -> str:
    """Hands a reference from worker to worker; the last one uses it."""
    if not path:
        return greet(rref)
    result: str = rpc_sync(path[0], forward, (rref, *path[1:]))
    return result


def is_here(rref: RRef[Thing], name: str) -> bool:
    return rref.is_owner() and rref.local_value() is _alive[name]()

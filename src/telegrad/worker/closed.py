"""What stands in the place of a worker's native engine once the worker is closed.

The engine has descriptors, memory and a thread. Whoever keeps a reference, a future or the worker itself keeps the
worker's Python objects, but must not keep those: so the worker lets go of the engine when it closes, and what is asked
of it afterwards is answered here. A thread that is inside a method of the engine at that moment still has it; it ends
with the last one.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from telegrad import _core
from telegrad.errors import NotInitialized

__all__ = ["AnyClient", "AnyEngine", "AnyServer", "ClosedEngine"]

_UNDER_WAY = (
    "pending_calls",
    "queued_requests",
    "pool_threads",
    "running_handlers",
    "running_requests",
    "connections",
    "common_pieces",
    "lanes",
)
_TOTALS = ("requests", "replies", "sent_messages", "received_messages", "pool_hits", "pool_misses")
_MEMORY = ("live_blocks", "live_bytes", "cached_blocks", "cached_bytes")


class ClosedEngine:
    """The methods of `_core.Engine`, and of `_core.Client` and `_core.Server`, which have it: those that need it
    raise `NotInitialized`, the others do nothing.

    Args:
        engine: the one that has been stopped, for its totals; None where it must not be touched, as in a forked child.
    """

    def __init__(self, engine: _core.Engine | None) -> None:
        self._stats: dict[str, Any] = dict.fromkeys((*_UNDER_WAY, *_TOTALS, *_MEMORY), 0)
        self._memory: _core.Memory | None = None  # messages that were received may still be in use
        if engine is not None:
            last = engine.stats()
            self._stats |= {key: last[key] for key in _TOTALS}
            self._memory = engine.memory

    # ---- what cannot be done any more

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotInitialized

    call: Callable[..., NoReturn] = _refuse
    start: Callable[..., NoReturn] = _refuse
    create: Callable[..., NoReturn] = _refuse
    call_request: Callable[..., NoReturn] = _refuse
    start_request: Callable[..., NoReturn] = _refuse
    start_many: Callable[..., NoReturn] = _refuse
    ask: Callable[..., NoReturn] = _refuse
    answer: Callable[..., NoReturn] = _refuse
    wait: Callable[..., NoReturn] = _refuse
    collect: Callable[..., NoReturn] = _refuse
    listen: Callable[..., NoReturn] = _refuse
    set_peer: Callable[..., NoReturn] = _refuse

    # ---- what is done already, or concerns nobody any more

    def _ignore(self, *_: Any) -> None:
        """Nothing is left to do."""

    record_all: Callable[..., None] = _ignore
    next: Callable[..., None] = _ignore
    resume: Callable[..., None] = _ignore
    reply: Callable[..., None] = _ignore
    nudge: Callable[..., None] = _ignore
    stop: Callable[..., None] = _ignore
    part_from: Callable[..., None] = _ignore
    forget_peer: Callable[..., None] = _ignore
    not_spawned: Callable[..., None] = _ignore
    tell_collectors: Callable[..., None] = _ignore

    def lend(self, *_: Any) -> None:
        """None: there is no link, and so no memory of one."""

    def largest_body(self, *_: Any) -> int:
        """0: there is no connection."""
        return 0

    def send(self, *_: Any) -> bool:
        """False: every peer is gone."""
        return False

    def tell(self, *_: Any) -> bool:
        """True: there is nobody to be told."""
        return True

    def stats(self) -> dict[str, Any]:
        """As that of the engine: totals as they were at the end, nothing under way, and what is still in use of the
        memory that was received."""
        return self._stats if self._memory is None else self._stats | self._memory.stats()


AnyEngine: TypeAlias = _core.Engine | ClosedEngine
AnyClient: TypeAlias = _core.Client | ClosedEngine
AnyServer: TypeAlias = _core.Server | ClosedEngine

"""Replacement for the native engine of a closed worker.

The engine has file descriptors, memory and a thread. A program may keep references, futures or the worker for
longer, and with them the worker's Python objects. So a closing worker replaces its engine by a `ClosedEngine`. A thread
inside a method of the engine still holds the engine, which ends with the last such thread.
"""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

from telegrad import _core
from telegrad.errors import NotInitialized

__all__ = ["AnyClient", "AnyEngine", "AnyServer", "ClosedEngine", "WorkerCalls"]

_PENDING = (
    "pending_calls",
    "queued_requests",
    "pool_threads",
    "running_handlers",
    "running_requests",
    "detached_requests",
    "connections",
    "multicast_buffers",
    "lanes",
)
_TOTALS = ("requests", "replies", "sent_messages", "received_messages", "pool_hits", "pool_misses")
_MEMORY = ("live_blocks", "live_bytes", "cached_blocks", "cached_bytes")


class ClosedEngine:
    """Methods of `_core.Engine`, `_core.Client` and `_core.Server` after closing.

    Methods that need an engine raise `NotInitialized`; all others do nothing.

    Args:
        engine: The stopped engine, for its totals; None if the engine must not be used, as in a forked child.
        why: Why the worker is closed, if the program has not closed it.
    """

    def __init__(self, engine: _core.Engine | None, why: str = "") -> None:
        self.is_inherited: bool = engine is None  # no thread of this process completes the calls
        self._why = why
        self._stats: dict[str, object] = dict.fromkeys((*_PENDING, *_TOTALS, *_MEMORY), 0)
        self._memory: _core.Memory | None = None  # received messages may still be in use
        if engine is not None:
            last = engine.stats()
            self._stats |= {key: last[key] for key in _TOTALS}
            self._memory = engine.memory

    # ---- methods that raise

    def raise_closed(self, *_: object, **__: object) -> NoReturn:
        """Raise the error of a use of the closed worker."""
        if self.is_inherited:
            raise NotInitialized
        raise NotInitialized.closed(self._why)

    call: Callable[..., NoReturn] = raise_closed
    start: Callable[..., NoReturn] = raise_closed
    create: Callable[..., NoReturn] = raise_closed
    call_request: Callable[..., NoReturn] = raise_closed
    start_request: Callable[..., NoReturn] = raise_closed
    start_many: Callable[..., NoReturn] = raise_closed
    read_scope: Callable[..., NoReturn] = raise_closed
    send_gradients: Callable[..., NoReturn] = raise_closed
    await_gradients: Callable[..., NoReturn] = raise_closed
    wait: Callable[..., NoReturn] = raise_closed
    complete_many: Callable[..., NoReturn] = raise_closed
    listen: Callable[..., NoReturn] = raise_closed
    set_peer: Callable[..., NoReturn] = raise_closed

    # ---- methods without an effect

    def _noop(self, *_: object) -> None:
        """Do nothing: the worker is closed."""

    record_all: Callable[..., None] = _noop
    next: Callable[..., None] = _noop
    resume: Callable[..., None] = _noop
    request_callback: Callable[..., None] = _noop
    stop: Callable[..., None] = _noop
    disconnect: Callable[..., None] = _noop
    remove_peer: Callable[..., None] = _noop
    spawn_failed: Callable[..., None] = _noop
    expire: Callable[..., None] = _noop
    notify_wait_sets: Callable[..., None] = _noop

    acknowledge: Callable[..., None] = _noop
    set_epoch: Callable[..., None] = _noop
    mark_late: Callable[..., None] = _noop

    def cancel(self, *_: object) -> bool:
        """Return False: every call has ended."""
        return False

    def detach(self, *_: object) -> bool:
        """Return True: the callers of all requests are disconnected."""
        return True

    is_canceled: Callable[..., bool] = detach

    def is_open(self, *_: object) -> bool:
        """Return False: all sessions have ended."""
        return False

    reply: Callable[..., bool] = is_open

    def find_request(self, *_: object) -> None:
        """Return None: no request is running."""

    def snapshot(self) -> tuple[None, dict[int, object]]:
        """Return nothing: there are neither calls nor connections."""
        return None, {}

    def lend(self, *_: object) -> None:
        """Return None: there is no link that could lease memory."""

    def parked(self) -> int:
        """Return 0: there are no requests."""
        return 0

    def largest_body(self, *_: object) -> int:
        """Return 0: there is no connection."""
        return 0

    def send(self, *_: object) -> bool:
        """Return False: no peer is connected."""
        return False

    def notify_context_ended(self, *_: object) -> bool:
        """Return True: there is no peer to notify."""
        return True

    def stats(self) -> dict[str, Any]:
        """Return final totals, nothing pending, and the received memory still in use."""
        return self._stats if self._memory is None else self._stats | self._memory.stats()


AnyEngine: TypeAlias = _core.Engine | ClosedEngine
AnyClient: TypeAlias = _core.Client | ClosedEngine
AnyServer: TypeAlias = _core.Server | ClosedEngine


class WorkerCalls(Protocol):
    """Calls of a worker (`telegrad.worker.calls.client.Calls`)."""

    client: AnyClient
    engine: AnyEngine

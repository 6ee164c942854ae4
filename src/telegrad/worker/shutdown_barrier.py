"""One stage of a graceful shutdown: `telegrad.protocols.shutdown` on the network."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from telegrad.protocols.shutdown import (
    Ask,
    Count,
    Counters,
    Done,
    Drain,
    Effect,
    Finished,
    GaveUp,
    Message,
    Missing,
    MissingQuery,
    Pause,
    Ready,
    Report,
    Send,
)
from telegrad.waits import wait_for

__all__ = ["ShutdownBarrier"]

_MESSAGES: tuple[type, ...] = (
    Ready,
    Ask,
    Report,
    Finished,
    MissingQuery,
    Missing,
)  # their index is their number on the wire
_PAUSE = 0.005  # s between two rounds while work is pending
_FINAL_GRACE = 1.0  # s for the leader to report missing workers, and for the others to leave first


class ShutdownBarrier:
    """Barrier that all live workers of a group pass together once no work is left.

    Args:
        worker_id: Id of this worker.
        ensure_connected: Connects this worker to some peers.
        send: Sends a plain value to a peer.
        call_later: Runs a function after a delay in seconds, on a thread of the worker.
        activity: Returns (received requests, pending work); both exact when nothing is pending.
    """

    def __init__(
        self,
        worker_id: int,
        ensure_connected: Callable[[Iterable[int]], None],
        send: Callable[[int, Any], None],
        call_later: Callable[[float, Callable[[], None]], None],
        activity: Callable[[], tuple[int, int]],
    ) -> None:
        self._worker_id = worker_id
        self._ensure_connected = ensure_connected
        self._send = send
        self._call_later = call_later
        self._activity = activity
        self._lock = threading.RLock()
        self._finished = threading.Event()
        self._last_member = threading.Event()
        self._has_connected = False
        self._machine = Drain(worker_id, ())

    def set_members(self, members: Sequence[int]) -> None:
        """Set the members of the group. Called once, before any worker can shut down."""
        with self._lock:
            self._machine = Drain(self._worker_id, members)

    def run(self, timeout: float, last: bool) -> Done | GaveUp:
        """Wait until all workers have arrived and all work is done.

        The leader leaves last. Otherwise a worker could process the end of its link to the leader before the leader's
        message that all is done, because each runs on a thread of its own; it would then elect a new leader among the
        workers that left.

        Args:
            timeout: Limit in seconds; 0 for none.
            last: This worker leaves afterwards.
        """
        self._step(self._machine.arrive)
        if not wait_for(self._finished, timeout or None):
            self._step(self._machine.expire)
            if not self._finished.wait(_FINAL_GRACE):
                self._step(self._machine.expire)
        with self._lock:
            over, led = self._machine.over, self._machine.leader == self._worker_id
        assert over is not None
        if last and led and isinstance(over, Done):
            self._last_member.wait(_FINAL_GRACE)
        return over

    def stop(self) -> None:
        """End all waits, because the worker closes."""
        with self._lock:
            if self._machine.over is None:
                self._machine.over = GaveUp(())
        self._finished.set()
        self._last_member.set()

    def on_message(self, sender: int, plain: Any) -> None:
        message = _read(plain)
        self._step(lambda: self._machine.handle(sender, message))

    def peer_gone(self, peer: int, orderly: bool) -> None:
        self._step(lambda: self._machine.peer_gone(peer, orderly))

    def _step(self, change: Callable[[], Sequence[Effect]]) -> None:
        """Change the machine and carry out its effects; sends without the lock."""
        messages: list[Send] = []
        awaited: list[int] = []
        with self._lock:
            effects = list(change())
            while effects:
                effect = effects.pop(0)
                if isinstance(effect, Send):
                    messages.append(effect)
                elif isinstance(effect, Count):
                    received, pending = self._activity()
                    # Only the received requests distinguish two idle moments: a call in progress counts as
                    # pending at its caller.
                    counters = Counters({self._worker_id: received}, {self._worker_id: received}, pending)
                    effects += self._machine.counted(effect.asker, effect.round, counters)
                elif isinstance(effect, Pause):
                    self._call_later(_PAUSE, lambda: self._step(self._machine.resume))
                else:
                    self._finished.set()
            machine = self._machine
            if machine.live == {self._worker_id}:
                self._last_member.set()
            if (
                machine.arrived
                and machine.leader == self._worker_id
                and machine.over is None
                and not self._has_connected
            ):
                # Without a link, the death of a worker is not noticed, and the leader would wait for it.
                self._has_connected = True
                awaited = sorted(machine.live - {self._worker_id})
        self._ensure_connected(awaited)
        for message in messages:
            self._send(message.to, _write(message.message))


def _write(message: Message) -> Any:
    if isinstance(message, Report):
        c = message.counters
        return (_MESSAGES.index(Report), message.round, (dict(c.sent), dict(c.handled), c.pending))
    return (_MESSAGES.index(type(message)), *message)


def _read(plain: Any) -> Message:
    number, *fields = plain
    kind = _MESSAGES[number]
    if kind is Report:
        return Report(fields[0], Counters(*fields[1]))
    message: Message = kind(*fields)
    return message

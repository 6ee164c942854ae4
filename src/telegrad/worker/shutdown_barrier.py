"""One stage of a graceful shutdown: the glue between `telegrad.protocols.shutdown` and the network."""

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
    Pause,
    Ready,
    Report,
    Send,
    Who,
)
from telegrad.waits import wait_for

__all__ = ["ShutdownBarrier"]

_MESSAGES: tuple[type, ...] = (Ready, Ask, Report, Finished, Who, Missing)  # numbered on the wire by their place
_PAUSE = 0.005  # s between two rounds while work goes on
_LAST_WORD = 1.0  # s that the leader has to say who is missing, and the others to leave before it


class ShutdownBarrier:
    """A point that all live workers of the group pass together, when no work is left among them.

    Args:
        me: the worker's id.
        greet: sees to it that there are links to some peers.
        send: sends a plain value to a peer.
        later: runs a function after some seconds, on a thread of the worker.
        activity: (requests received so far, things under way); both exact when nothing is under way.
    """

    def __init__(
        self,
        me: int,
        ensure_connected: Callable[[Iterable[int]], None],
        send: Callable[[int, Any], None],
        later: Callable[[float, Callable[[], None]], None],
        activity: Callable[[], tuple[int, int]],
    ) -> None:
        self._me = me
        self._greet = ensure_connected
        self._send = send
        self._later = later
        self._activity = activity
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._alone = threading.Event()
        self._greeted = False
        self._machine = Drain(me, ())

    def expect(self, members: Sequence[int]) -> None:
        """Who is in the group. Called once, before anybody can shut down."""
        with self._lock:
            self._machine = Drain(self._me, members)

    def run(self, timeout: float, last: bool) -> Done | GaveUp:
        """Waits until all workers come here and all work is done; no longer than `timeout` seconds (0: no limit).

        `last`: this worker leaves afterwards. The leader leaves last. Another worker may take up the end of its link
        to the leader before the word on it that all is done, since each runs on a thread of its own; it would then
        look for a new leader among those who left.
        """
        self._step(self._machine.arrive)
        if not wait_for(self._over, timeout or None):
            self._step(self._machine.expire)
            if not self._over.wait(_LAST_WORD):
                self._step(self._machine.expire)
        with self._lock:
            over, led = self._machine.over, self._machine.leader == self._me
        assert over is not None
        if last and led and isinstance(over, Done):
            self._alone.wait(_LAST_WORD)
        return over

    def stop(self) -> None:
        """The worker closes: whoever waits here goes on."""
        with self._lock:
            if self._machine.over is None:
                self._machine.over = GaveUp(())
        self._over.set()
        self._alone.set()

    def on_message(self, sender: int, plain: Any) -> None:
        message = _read(plain)
        self._step(lambda: self._machine.handle(sender, message))

    def peer_gone(self, peer: int, orderly: bool) -> None:
        self._step(lambda: self._machine.peer_gone(peer, orderly))

    def _step(self, change: Callable[[], Sequence[Effect]]) -> None:
        """Lets the machine move, and does what it asks for; sends without the lock."""
        messages: list[Send] = []
        waited_for: list[int] = []
        with self._lock:
            todo = list(change())
            while todo:
                effect = todo.pop(0)
                if isinstance(effect, Send):
                    messages.append(effect)
                elif isinstance(effect, Count):
                    received, pending = self._activity()
                    # What this worker was asked to do is all that tells two quiet moments apart: a call that is
                    # under way is pending at its caller.
                    counters = Counters({self._me: received}, {self._me: received}, pending)
                    todo += self._machine.counted(effect.asker, effect.round, counters)
                elif isinstance(effect, Pause):
                    self._later(_PAUSE, lambda: self._step(self._machine.resume))
                else:
                    self._over.set()
            machine = self._machine
            if machine.live == {self._me}:
                self._alone.set()
            if machine.arrived and machine.leader == self._me and machine.over is None and not self._greeted:
                # Whoever has died without ever having had a link to this worker would be waited for.
                self._greeted = True
                waited_for = sorted(machine.live - {self._me})
        self._greet(waited_for)
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

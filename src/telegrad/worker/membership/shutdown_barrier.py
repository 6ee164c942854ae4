"""Graceful shutdown of a group: `telegrad.protocols.shutdown` on the network.

A static group shuts down in two stages: first all work ends, then all references are released.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from telegrad.errors import NotInitialized, ShutdownTimeout
from telegrad.group import rendezvous
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
from telegrad.timeouts import SharedDeadline
from telegrad.types import WorkerInfo
from telegrad.waits import wait_for
from telegrad.wire import Tag
from telegrad.worker import lifecycle_log
from telegrad.worker.calls.interceptors import is_internal
from telegrad.worker.closed import AnyEngine
from telegrad.worker.membership.members import Members
from telegrad.worker.timers import Timers

__all__ = ["GracefulShutdown", "ShutdownBarrier"]

_MESSAGES: tuple[type, ...] = (
    Ready,
    Ask,
    Report,
    Finished,
    MissingQuery,
    Missing,
)  # their index is their number on the wire
_DRAIN_STEP = 0.005  # s between two checks for pending work
_PAUSE = 0.005  # s between two rounds while work is pending
_STORE_TIMEOUT = 5.0  # s for an operation of the store: its host may be silent
_MARK_TIMEOUT = 1.0  # s for the mark of the end, for which all members wait
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

    def peer_back(self, peer: int) -> None:
        self._step(lambda: self._machine.peer_back(peer))

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


class _Deferred(Protocol):
    """Request with a deferred result (`worker.serving.event_loop.DeferredRequest`)."""

    @property
    def handler(self) -> object: ...


class _Handlers(Protocol):
    """Handlers of a worker (`telegrad.worker.serving.handlers.Handlers`)."""

    @property
    def parked_requests(self) -> int: ...

    def deferred_requests(self) -> Mapping[tuple[int, int], _Deferred]: ...


class _Host(Protocol):
    """Worker that shuts down."""

    info: WorkerInfo
    engine: AnyEngine
    members: Members
    timers: Timers
    store: Any
    membership: Any
    closed: bool
    fenced: str
    passive_work: list[Callable[[], set[object]]]
    waiting_readers: list[Callable[[], int]]

    @property
    def handlers(self) -> _Handlers: ...

    def ensure_connected(self, peers: Iterable[int]) -> None: ...

    def send_oneway(self, peer: int, tag: Tag, value: object) -> None: ...


class GracefulShutdown:
    """Both stages of one worker's graceful shutdown.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: _Host) -> None:
        self._worker = worker
        self.is_leaving: bool = False
        self._stages = tuple(
            ShutdownBarrier(
                worker.info.id,
                worker.ensure_connected,
                partial(self._send, stage),
                worker.timers.call_later,
                self._activity,
            )
            for stage in range(2)
        )
        self._never_set = threading.Event()  # paces `drain`

    def _send(self, stage: int, peer: int, message: object) -> None:
        self._worker.send_oneway(peer, Tag.SHUTDOWN, (stage, message))

    def _activity(self) -> tuple[int, int]:
        """Return the requests received so far, and the pending calls and requests."""
        worker = self._worker
        before = [find() for find in worker.passive_work]
        stats = worker.engine.stats()
        pending: int = stats["pending_calls"] + stats["queued_requests"] + stats["running_requests"]
        for find, passive in zip(worker.passive_work, before, strict=False):
            pending -= len(passive & find())  # in progress when the engine counted
        return stats["requests"], pending

    def _deferred(self) -> int:
        """Return the number of requests that no thread runs, and of waiting readers."""
        worker = self._worker
        # A request for further items of a stream ends with the stream.
        requests = [each for each in worker.handlers.deferred_requests().values() if not is_internal(each.handler)]
        return len(requests) + worker.handlers.parked_requests + sum(count() for count in worker.waiting_readers)

    def set_members(self, members: Sequence[int]) -> None:
        """Set the other workers of a static group. Called before any worker can shut down."""
        for stage in self._stages:
            stage.set_members(members)

    def on_message(self, peer: int, stage: int, message: Any) -> None:
        """Handle a peer's message to one stage."""
        self._stages[stage].on_message(peer, message)

    def peer_gone(self, peer: int, departed: bool) -> None:
        """Handle the loss of a peer."""
        for stage in self._stages:
            stage.peer_gone(peer, departed)

    def peer_back(self, peer: int) -> None:
        """Handle the return of a lost peer, or its new process."""
        for stage in self._stages:
            stage.peer_back(peer)

    def stop(self) -> None:
        """End all waits, because the worker closes."""
        for stage in self._stages:
            stage.stop()

    def run(self, timeout: float, last: bool) -> None:
        """Wait until all workers of a static group shut down and all their work is done.

        Args:
            timeout: Limit in seconds; 0 for none.
            last: Run the second stage: wait until all references are released; then this worker leaves.

        Raises:
            ShutdownTimeout: A worker did not shut down in time, or stopped waiting and left.
            NotInitialized: The group has gone on without this worker, or another thread has closed it.
        """
        worker, members = self._worker, self._worker.members
        self.is_leaving = last
        budget = SharedDeadline(timeout)
        end = self._stages[last].run(timeout, last)
        if worker.closed:
            raise NotInitialized.closed(worker.fenced or "Another thread has shut down the worker in the meantime.")
        if isinstance(end, GaveUp):
            if worker.membership is not None:
                rendezvous.mark_abandoned(worker.membership.log.store, self._store_timeout(budget))
            raise ShutdownTimeout(timeout, tuple(map(members.name_of, end.missing)))
        gone = (*end.lost, *end.left)
        if gone and not last and self._is_abandoned(budget):
            raise ShutdownTimeout(timeout, tuple(map(members.name_of, gone)), gave_up=True)
        members.gone_at_shutdown.update(gone)
        if not last and worker.membership is not None:
            if worker.info.id == 0:  # before the last stage: no other member leaves until the mark is written
                log = worker.membership.log
                limit = min(_MARK_TIMEOUT, self._store_timeout(budget) / 4)
                rendezvous.mark_ended(log.store, log.group, log.view.world_size, limit)
            worker.membership.stop(False, budget.left())  # the store may end when its host leaves
        for peer in end.lost if last else ():
            if peer not in members.lost:
                lifecycle_log.lost(worker, peer, "others noticed; this worker had no connection to it")

    def _is_abandoned(self, budget: SharedDeadline) -> bool:
        service = self._worker.membership
        return service is not None and rendezvous.is_abandoned(service.log.store, self._store_timeout(budget))

    @staticmethod
    def _store_timeout(budget: SharedDeadline) -> float:
        return min(budget.left() or _STORE_TIMEOUT, _STORE_TIMEOUT)

    def drain(self, timeout: float) -> bool:
        """Wait until no call and no request is pending; return False on timeout.

        Requests with a deferred result are pending, too: their callers do not shut down with this worker. So are
        requests that wait for their inputs, and the threads and tasks of this worker that wait for an item of a stream.

        Args:
            timeout: Limit in seconds; 0 for none.
        """
        deadline = time.monotonic() + timeout if timeout else None
        while self._activity()[1] or self._deferred():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._never_set.wait(_DRAIN_STEP)
        return True


def _write(message: Message) -> object:
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

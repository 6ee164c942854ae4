"""Remote references of one worker: the glue between the protocol (telegrad.protocols.rref), values and the network.

The machine decides who counts whom; here is what it cannot know: the values, who waits for them, and the lock around
it. A reference's Python object is one handle; its finalizer only appends to `dropped` and requests a callback, and a
thread of the pool tells the machine.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from telegrad.errors import OwnerLost, RRefDeleted, RRefError, RRefTimeout
from telegrad.protocols.rref import (
    Confirmed,
    Delete,
    Effect,
    Failed,
    Leak,
    OwnerState,
    RRefId,
    RRefStats,
    RRefTable,
    Send,
    Ticket,
    UnusableRRefError,
    UserState,
)
from telegrad.serialize.tracebacks import text_of
from telegrad.waits import SIGNAL_CHECK_INTERVAL
from telegrad.worker.refs.messages import as_plain, from_plain
from telegrad.worker.refs.owned_value import OwnedValue

__all__ = ["CreationTarget", "References", "rref_id"]

_NOTHING: Sequence[Callable[[], None]] = ()
_MAX_REASON = 8 << 10  # characters of an error that travel in a message that must not be too large
_USABLE = (UserState.CONFIRMED, UserState.CREATING, UserState.FORKING)  # users' states in which nothing is wrong


rref_id: partial[RRefId] = partial(tuple.__new__, RRefId)  # of a pair, as RRefId(*pair), but at once


class CreationTarget(Protocol):
    """A call that makes a value elsewhere (telegrad.rref.creation)."""

    rref: RRefId | None  # set by `References.begin_create`
    ended: bool


class References:
    """All references of one worker.

    Args:
        worker_id: the worker's id.
        first_id: where its local ids start; no earlier incarnation may have used one from there on.
        name_of: a worker's name by its id.
        send: sends a plain value to a peer; False if the peer is gone.
        request_callback: asks a pool thread to call `collect`. Must be safe in a finalizer.
        make_handle: makes the Python object of a reference that has arrived: (id, owner, (sender, fork)).
    """

    def __init__(
        self,
        worker_id: int,
        first_id: int,
        name_of: Callable[[int], str],
        send: Callable[[int, Any, str], None],
        request_callback: Callable[[], None],
        make_handle: Callable[[RRefId, int, tuple[int, int]], Any],
    ) -> None:
        self.worker_id = worker_id
        self.table: RRefTable = RRefTable(worker_id)
        self.values: dict[RRefId, OwnedValue] = {}  # always the same object: the core looks there, too
        self._batched = self.table.batched
        self._collect_requested = False  # `collect` has been asked for since something was batched
        self.dropped: deque[tuple[RRefId, int]] = deque()
        self.pending_creations: int = 0
        self._has_waiter = False  # somebody waits for all to be gone
        self._failed_here: dict[RRefId, str] = {}  # creations on this worker itself that its caller has given up
        self.closed: bool = False
        self._confirmations: dict[RRefId, list[tuple[set[RRefId], Callable[[], None]]]] = {}
        self.lock: threading.RLock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._ids = itertools.count(first_id)
        self._name_of = name_of
        self._send = send
        self._request_callback = request_callback
        self._make_handle = make_handle

    def detach_after_fork(self) -> None:
        """In a forked child: all is dead, and the thread of the parent that had the lock will not give it back."""
        self.closed = True
        self.dropped = deque(maxlen=0)  # a handle's end here concerns nobody
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    # ---- handles

    def new_id(self) -> int:
        """The number of a new reference, or of a fork of one. As in torch, nothing else takes a number."""
        return next(self._ids)

    def release_handle(self, rref: RRefId, generation: int) -> None:
        """A handle's finalizer: takes no lock."""
        self.dropped.append((rref, generation))
        self._request_callback()

    def collect(self) -> None:
        """Tells the machine of the handles that are gone, and sends what it batched."""
        with self.lock:
            self._collect_requested = False
            deferred = self._apply([*self._drop_handles(), *self.table.flush()])
        self._run_deferred(deferred)

    def _drop_handles(self) -> list[Effect]:
        """With the lock held: tells the machine of the handles that are gone."""
        effects: list[Effect] = []
        while self.dropped:
            try:
                rref, generation = self.dropped.popleft()
            except IndexError:
                break
            effects += self.table.drop(rref, generation)
        return effects

    # ---- creation

    def own(self, value: Any) -> RRefId:
        """A reference to a value that is here."""
        rref = RRefId(self.worker_id, self.new_id())
        with self.lock:
            owned = self.values[rref] = OwnedValue(self.lock)
            owned.set_result(value, None)
            deferred = self._apply(self.table.own(rref))
        self._run_deferred(deferred)
        return rref

    def begin_create(self, owner: int, local_id: int, creation: CreationTarget) -> RRefId:
        """A reference to what a remote call will make, or is making already."""
        rref = rref_id((self.worker_id, local_id))
        with self.lock:
            creation.rref = rref
            if owner == self.worker_id:
                self.values[rref] = OwnedValue(self.lock)
            self.pending_creations += 1
            effects = self.table.begin_create(rref, owner)
            if self.dropped:  # who makes many lets go of as many: here this costs no other thread's time
                effects = [*effects, *self._drop_handles()]
            deferred = self._apply(effects)
        self._run_deferred(deferred)
        return rref

    def created(self, rref: RRefId) -> None:
        """The owner says that the value, or the failure to make it, is in place."""
        with self.lock:
            deferred = self._apply(self.table.created(rref))
        self._run_deferred(deferred)

    def finish_creation(self, creation: CreationTarget, created: bool) -> bool:
        """The creating call has ended, in whatever way; and its reference has been `created` by it. False:
        `begin_create` is still to come, and nothing has been done."""
        with self.lock:
            rref = creation.rref
            if rref is None:
                return False
            self.pending_creations -= 1
            creation.ended = True
            deferred = self._apply(self.table.created(rref) if created else ())
        self._run_deferred(deferred)
        return True

    def create_failed(self, rref: RRefId, error: BaseException, may_exist: bool) -> None:
        """The creating call failed: for its users here there is no value."""
        why = f"{type(error).__name__}: {text_of(error)}"[:_MAX_REASON]
        with self.lock:
            owned = self.values.get(rref)
            if owned is not None:  # on this worker itself
                deferred: Sequence[Callable[[], None]] = ()
                self._failed_here[rref] = why
                if not may_exist and not owned.ready:
                    deferred = (*owned.set_result(None, error), *self._apply(self.table.value_failed(rref)))
            else:
                deferred = self._apply(self.table.create_failed(rref, why, may_exist))
        self._run_deferred(deferred)

    def accept_create(self, rref: RRefId, creator: int) -> OwnedValue:
        """Owner: a creation has arrived."""
        with self.lock:
            owned = self.values.get(rref)
            if owned is None or owned.ready:  # ready: it was given up because its creator was lost, who is back now
                owned = self.values[rref] = OwnedValue(self.lock)
            deferred = self._apply(self.table.accept_create(rref, creator)) if creator != self.worker_id else _NOTHING
        if deferred:
            self._run_deferred(deferred)
        return owned

    def settle(self, rref: RRefId, value: Any, error: BaseException | None) -> None:
        """Owner: the function that makes the value has returned or raised."""
        with self.lock:
            owned = self.values.get(rref)
            if owned is None or owned.ready:
                return
            parked = owned.set_result(value, error)
            deferred = self._apply(self.table.value_ready(rref) if error is None else self.table.value_failed(rref))
            if parked:
                deferred = (*parked, *deferred)
        if deferred:
            self._run_deferred(deferred)

    def knows(self, rref: RRefId) -> bool:
        """Is there a value of this name here, or is there to be one?"""
        return rref in self.values or self.table.state_of(rref) is not None

    def owned(self, rref: RRefId) -> OwnedValue:
        """The value of a reference that this worker owns.

        Raises:
            RRefDeleted: it is gone.
        """
        with self.lock:
            owned = self._value_of(rref)
        if owned is None:
            raise RRefDeleted(f"{rref} has been deleted: no reference to it was left on any worker.")
        return owned

    def park(self, rref: RRefId, resume: Callable[[], None]) -> bool:
        """Has `resume` run when the value is there. False: no need to wait (or nothing to wait for)."""
        with self.lock:
            owned = self._value_of(rref)
            return owned is not None and owned.add_waiter(resume)

    def _value_of(self, rref: RRefId) -> OwnedValue | None:
        """With the lock held: the value or its place; for a reference that is known only because others spoke of it
        before its creation came, the place is made here."""
        owned = self.values.get(rref)
        if owned is None and isinstance(self.table.state_of(rref), OwnerState):
            owned = self.values[rref] = OwnedValue(self.lock)
            failure = self.table.failure_of(rref)
            if failure is not None:
                owned.set_result(None, self.never_arrived(rref, *failure))
        return owned

    # ---- travel

    def share(self, rref: RRefId, owner: int, peer: int) -> Ticket:
        """The ticket that carries a reference to a peer.

        Raises:
            RRefDeleted, RRefTimeout, OwnerLost: it cannot travel any more.
        """
        with self.lock:
            if self.closed:
                raise RRefDeleted("Cannot call fork an UserRRef after deletion.")
            if rref in self._failed_here:
                raise RRefTimeout(f"{rref}: {self._failed_here[rref]}")
            try:
                return self.table.share(rref, peer)
            except UnusableRRefError as e:
                raise self.failure(rref, owner, e.why, e.lost) from None

    def confirmed(self, rref: RRefId) -> bool:
        """Does the owner count this worker's reference (or is it this worker)?"""
        state = self.table.state_of(rref)
        return state is UserState.CONFIRMED or not isinstance(state, UserState)

    def check(self, rref: RRefId, owner: int) -> None:
        """Raises what stands against using the reference, if anything."""
        if not self.closed and not self._failed_here and self.table.state_of(rref) in _USABLE:
            return  # nearly always; a look needs no lock
        error = self.unusable_reason(rref, owner)
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it and this frame, and with it its caller's reference, keep each other

    def unusable_reason(self, rref: RRefId, owner: int) -> RRefError | OwnerLost | None:
        """The error that stands against using the reference, if any."""
        if self.closed:
            return RRefDeleted(
                f"{rref} was given up when its worker shut down. Cannot call to_here() on it after deletion."
            )
        with self.lock:
            if rref in self._failed_here:
                return RRefTimeout(f"{rref}: {self._failed_here[rref]}")
            failure = self.table.failure_of(rref) if owner != self.worker_id else None
        return None if failure is None else self.failure(rref, owner, *failure)

    def failure(self, rref: RRefId, owner: int, why: str, lost: bool) -> RRefError | OwnerLost:
        """The error for a reference that the machine calls unusable."""
        if lost:
            return OwnerLost(self._name_of(owner), why, str(rref))
        return RRefTimeout(f"{rref}: {why}")

    def never_arrived(self, rref: RRefId, why: str, lost: bool) -> RRefError | OwnerLost:
        """At the owner: the creation of a value that others refer to will not come, because of its creator."""
        return self.failure(rref, rref.created_on, why, lost)

    def unshare(self, ticket: Ticket, peer: int) -> None:
        """The message with this ticket did not leave."""
        with self.lock:
            deferred = self._apply(self.table.unshare(ticket, peer))
        self._run_deferred(deferred)

    def receive(self, tickets: Sequence[Ticket], forks: Sequence[int], sender: int) -> list[Any]:
        """Makes the Python objects of references that have arrived, with the sender's numbers of these forks."""
        if not tickets:
            return []
        effects: list[Effect] = []
        with self.lock:
            for ticket in tickets:
                effects += self.table.receive(ticket, sender)
            deferred = self._apply(effects)
        handles = [
            self._make_handle(ticket.rref, ticket.owner, (sender, fork))
            for ticket, fork in zip(tickets, forks, strict=True)
        ]
        self._run_deferred(deferred)
        return handles

    def when_confirmed(self, rrefs: Sequence[RRefId], resume: Callable[[], None]) -> bool:
        """Has `resume` run once the owners count all these references (or cannot). False: they do already."""
        with self.lock:
            waiting = {rref for rref in rrefs if self.table.state_of(rref) is UserState.FORKING}
            if not waiting:
                return False
            for rref in waiting:
                self._confirmations.setdefault(rref, []).append((waiting, resume))
            return True

    def _confirmed(self, rref: RRefId) -> list[Callable[[], None]]:
        ready = []
        for waiting, resume in self._confirmations.pop(rref, ()):
            waiting.discard(rref)
            if not waiting:
                ready.append(resume)
        return ready

    # ---- the network

    def on_message(self, sender: int, plain: Any) -> None:
        """A message of a peer's machine."""
        with self.lock:
            deferred = self._apply(self.table.handle(sender, from_plain(plain)))
        self._run_deferred(deferred)

    def peer_lost(self, peer: int, why: str) -> None:
        with self.lock:
            deferred = self._apply(self.table.peer_lost(peer, why))
        self._run_deferred(deferred)

    def peer_joined(self, peer: int) -> None:
        with self.lock:
            deferred = self._apply(self.table.peer_joined(peer))
        self._run_deferred(deferred)

    # ---- the end

    def release_all(self, timeout: float) -> bool:
        """Gives up every reference to other workers' values, and waits until all are confirmed gone and nobody refers
        to this worker's. False: not within `timeout` seconds."""
        with self.lock:
            deferred = self._apply(self.table.release_all())
        self._run_deferred(deferred)
        self.collect()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._has_waiter = True
            while self._busy():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, SIGNAL_CHECK_INTERVAL))
        return True

    def _busy(self) -> bool:
        stats = self.table.stats()
        return bool(stats.pending_users or stats.forks or stats.pins or self.pending_creations)

    def stats(self) -> RRefStats:
        with self.lock:
            return self.table.stats()

    def leaks(self) -> list[Leak]:
        """What others still refer to."""
        with self.lock:
            return self.table.leaks()

    def close(self) -> None:
        """The worker is gone: values and what waits here are freed, handles are dead."""
        with self.lock:
            self.closed = True
            self.dropped = deque(maxlen=0)
            self._confirmations.clear()
            values = list(self.values.values())
            self.values.clear()
            parked = [
                resume
                for owned in values
                if not owned.ready
                for resume in owned.set_result(None, RRefDeleted("the worker that owns this value has shut down"))
            ]
        for resume in parked:
            resume()

    # ---- effects

    def _apply(self, effects: Sequence[Effect]) -> Sequence[Callable[[], None]]:
        """With the lock held: does what touches tables; returns what must be done without it."""
        if self._has_waiter:
            self._changed.notify_all()
        collects = self._collect_requested or not self._batched
        if not effects and collects:
            return _NOTHING
        deferred: list[Callable[[], None]] = []
        for effect in effects:
            if isinstance(effect, Send):
                deferred.append(partial(self._send, effect.to, as_plain(effect.message), type(effect.message).__name__))
            elif isinstance(effect, Delete):
                owned = self.values.pop(effect.rref, None)
                self._failed_here.pop(effect.rref, None)
                if owned is not None:
                    deferred.append(partial(_free, owned))
            elif isinstance(effect, Confirmed):
                deferred += self._confirmed(effect.rref)
            elif isinstance(effect, Failed):
                deferred += self._confirmed(effect.rref)
                owned = self.values.get(effect.rref)
                if owned is not None and not owned.ready:
                    deferred += owned.set_result(None, self.never_arrived(effect.rref, effect.why, effect.lost))
        if not collects:  # whatever changed has queued something: a pool thread sends it
            self._collect_requested = True
            deferred.append(self._request_callback)
        return deferred

    def _run_deferred(self, deferred: Sequence[Callable[[], None]]) -> None:
        for action in deferred:
            action()


def _free(_: OwnedValue) -> None:
    """The last use of a value: it ends here, without any lock held."""

"""Remote references of one worker: the protocol with values and network.

The protocol (telegrad.protocols.rref) counts references. This module adds the values, the threads that wait for them,
and the lock. Each Python object of a reference is one handle. Its finalizer only appends to `dropped` and interrupts
the engine; a pool thread notifies the protocol.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

from telegrad.errors import NotInitialized, OwnerLost, RRefDeleted, RRefTimeout, TelegradError
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
    TicketKind,
    UnusableRRefError,
    UserState,
)
from telegrad.waits import SIGNAL_CHECK_INTERVAL
from telegrad.worker.calls.encoded import NO_FORK
from telegrad.worker.diagnostics.size_warning import SizeWarning
from telegrad.worker.losses import LossReason
from telegrad.worker.refs.creations import Creations, CreationTarget, Refusal
from telegrad.worker.refs.messages import as_plain, from_plain
from telegrad.worker.refs.owned_value import ConfirmationWaiters, OwnedValue, free, split

__all__ = ["References"]

_NOTHING: Sequence[Callable[[], None]] = ()
_USABLE = (UserState.CONFIRMED, UserState.CREATING, UserState.FORKING)  # usable states of a user


class References(Creations):
    """References of one worker.

    Args:
        worker_id: Id of the worker.
        first_id: First local id; no earlier incarnation may have used it or a later one.
        name_of: Returns a worker's name by its id.
        lost_incarnation: Returns the incarnation that a worker's loss is about, by the id and the reason.
        send: Sends a plain value to a peer; the third argument is the kind of message, the fourth its epoch.
        request_callback: Makes a pool thread call `collect`. Must be safe in a finalizer.
        make_handle: Creates the Python object of a received reference from (id, owner, (sender, fork)).
        is_open: Returns whether the session of a connection has not ended.
        set_epoch: Sets the epoch of a peer's messages that may still be sent.
        submit: Runs a function on a thread of the pool.
        warning: Warning about many references.
    """

    def __init__(
        self,
        worker_id: int,
        first_id: int,
        name_of: Callable[[int], str],
        lost_incarnation: Callable[[int, str], int],
        send: Callable[[int, object, str, int], None],
        request_callback: Callable[[], None],
        make_handle: Callable[[RRefId, int, tuple[int, int]], object],
        is_open: Callable[[int], bool],
        set_epoch: Callable[[int, int], None],
        submit: Callable[..., None],
        warning: SizeWarning,
    ) -> None:
        self.worker_id = worker_id
        self.table: RRefTable = RRefTable(worker_id)
        self.values: dict[RRefId, OwnedValue] = {}  # never replaced: the core holds this object
        self._batched = self.table.batched
        self._collect_requested = False  # `collect` was requested after the first batched message
        self.dropped: deque[tuple[RRefId, int]] = deque()
        self._pending: set[CreationTarget] = set()
        self._has_waiter = False  # a thread waits for the release of all references
        self._failed_here: dict[RRefId, str] = {}  # local creations after the timeout of their callers
        self.closed: bool = False
        self._is_inherited = False  # by a forked child
        self._confirmations = ConfirmationWaiters()
        self.lock: threading.RLock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._ids = itertools.count(first_id)
        self._name_of = name_of
        self._lost_incarnation = lost_incarnation
        self._send = send
        self._request_callback = request_callback
        self._make_handle = make_handle
        self._is_open = is_open
        self._set_epoch = set_epoch
        self._submit = submit
        self.warning = warning

    def detach_after_fork(self) -> None:
        """Reset in a forked child, where a missing thread may hold the lock."""
        self.closed = self._is_inherited = True
        self.dropped = deque(maxlen=0)  # releases in the child have no effect
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    # ---- handles

    def new_id(self) -> int:
        """Return a number for a new reference or fork.

        As in torch, nothing else is numbered.
        """
        return next(self._ids)

    def release_handle(self, rref: RRefId, generation: int) -> None:
        """Record the end of a handle. Finalizers call it: takes no lock."""
        self.dropped.append((rref, generation))
        self._request_callback()

    def collect(self) -> None:
        """Notify the protocol of released handles, and send batched messages."""
        with self.lock:
            self._collect_requested = False
            deferred = self._apply([*self._drop_handles(), *self.table.flush()])
        self._run_deferred(deferred)

    def _drop_handles(self) -> list[Effect]:
        """Notify the protocol of released handles, with the lock held."""
        effects: list[Effect] = []
        while self.dropped:
            try:
                rref, generation = self.dropped.popleft()
            except IndexError:
                break
            effects += self.table.drop(rref, generation)
        return effects

    # ---- values

    def knows(self, rref: RRefId) -> bool:
        """Return whether this worker has, or will have, the value of a reference."""
        return rref in self.values or self.table.state_of(rref) is not None

    def owned(self, rref: RRefId) -> OwnedValue:
        """Return the value of a reference that this worker owns.

        Raises:
            RRefDeleted: The value has been deleted.
        """
        with self.lock:
            owned = self._value_of(rref)
        if owned is None:
            raise RRefDeleted(f"{rref} has been deleted: no worker held a reference to it any more.")
        return owned

    def park(self, rref: RRefId, resume: Callable[[], None]) -> bool:
        """Run `resume` once the value is ready; False if there is nothing to wait for."""
        with self.lock:
            owned = self._value_of(rref)
            return owned is not None and owned.add_waiter(resume)

    def _value_of(self, rref: RRefId) -> OwnedValue | None:
        """Return the value or its placeholder, with the lock held.

        Creates the placeholder if other workers have mentioned the reference before its creation arrived.
        """
        owned = self.values.get(rref)
        if owned is None and isinstance(self.table.state_of(rref), OwnerState):
            owned = self.values[rref] = OwnedValue(self.lock)
            failure = self.table.failure_of(rref)
            if failure is not None:
                owned.set_result(None, self.never_arrived(rref, *failure))
        return owned

    # ---- travel

    def share(self, rref: RRefId, owner: int, peer: int, epoch: int) -> Ticket:
        """Return the ticket that carries a reference to a peer.

        Args:
            rref: The reference.
            owner: Its owner.
            peer: The receiver.
            epoch: Epoch of the message. If it has ended, the core does not send the message, and nothing is counted.

        Raises:
            RRefDeleted, RRefTimeout, OwnerLost, Overloaded, MessageTooLarge: The reference is not usable any more.
        """
        with self.lock:
            if self.closed:
                raise RRefDeleted("Cannot call fork an UserRRef after deletion.")
            if rref in self._failed_here:
                raise self.failure(rref, owner, self._failed_here[rref], False)
            try:
                return self.table.share(rref, peer, epoch)
            except UnusableRRefError as e:
                raise self.failure(rref, owner, e.why, e.lost) from None

    def confirmed(self, rref: RRefId) -> bool:
        """Return whether the owner counts this worker's reference, or is this worker."""
        state = self.table.state_of(rref)
        return state is UserState.CONFIRMED or not isinstance(state, UserState)

    def check(self, rref: RRefId, owner: int) -> None:
        """Raise if the reference is not usable."""
        if not self.closed and not self._failed_here and self.table.state_of(rref) in _USABLE:
            return  # the common case; needs no lock
        error = self.unusable_reason(rref, owner)
        if error is not None:
            try:
                raise error
            finally:
                del error  # breaks the cycle of error and frame, which keeps the reference

    def unusable_reason(self, rref: RRefId, owner: int) -> TelegradError | None:
        """Return the error of a reference that is not usable, or None."""
        if self.closed:
            if self._is_inherited:
                return RRefDeleted(f"{rref} belongs to the process that created it. {NotInitialized.inherited}".strip())
            return RRefDeleted(
                f"{rref} was released when its worker shut down. Cannot call to_here() on it after deletion."
            )
        with self.lock:
            if rref in self._failed_here:
                return self.failure(rref, owner, self._failed_here[rref], False)
            failure = self.table.failure_of(rref) if owner != self.worker_id else None
        return None if failure is None else self.failure(rref, owner, *failure)

    def failure(self, rref: RRefId, owner: int, why: str, lost: bool) -> TelegradError:
        """Return the error of a reference that the protocol calls unusable."""
        if lost:
            return OwnerLost(self._name_of(owner), str(why), str(rref), self._lost_incarnation(owner, why))
        if isinstance(why, Refusal):
            return copy(why.error)  # each user gets an error with a traceback of its own
        return RRefTimeout(f"{rref}: {why}")

    def never_arrived(self, rref: RRefId, why: str, lost: bool) -> TelegradError:
        """Return the owner's error for a value that was never created.

        Either its creator is lost, or the creation was lost with a session: then the creator sees this worker as lost.
        """
        gone = rref.created_on if self.table.is_lost(rref.created_on) else self.worker_id
        return self.failure(rref, gone, why, lost)

    def unshare(self, ticket: Ticket, peer: int) -> None:
        """Take back a ticket that was not sent."""
        with self.lock:
            deferred = self._apply(self.table.unshare(ticket, peer))
        self._run_deferred(deferred)

    def receive(self, tickets: Sequence[Ticket], forks: Sequence[int], sender: int, connection: int) -> list[Any]:
        """Create the Python objects of received references.

        Args:
            tickets: The tickets.
            forks: The sender's numbers of the references.
            sender: The sender.
            connection: The connection of the message. If its session has ended, nothing counts the references any more:
                they are lost unless this worker holds them otherwise.
        """
        effects: list[Effect] = []
        with self.lock:
            if self._is_late(sender, connection):
                why = f"the connection to {self._name_of(sender)} was lost while it sent the reference"
                for ticket in tickets:
                    effects += self.table.receive_late(ticket, why)
            else:
                for ticket in tickets:
                    effects += self.table.receive(ticket, sender)
            deferred = self._apply(effects)
        handles = [
            self._make_handle(ticket.rref, ticket.owner, (sender, fork))
            for ticket, fork in zip(tickets, forks, strict=True)
        ]
        self._run_deferred(deferred)
        self.warning.check(self.table.size())
        return handles

    def hold(self, rref: RRefId, sender: int) -> list[Any]:
        """Create a handle of an owned reference, for a message about it.

        Its creation may still be on its way.
        """
        with self.lock:
            deferred = self._apply(self.table.receive(Ticket(rref, self.worker_id, TicketKind.RETURN, 0), sender))
        handles = [self._make_handle(rref, self.worker_id, (sender, NO_FORK))]
        self._run_deferred(deferred)
        return handles

    def epoch_of(self, peer: int) -> int:
        """Return the epoch of messages to a peer: its end ends what they count."""
        return self.table.epoch_of(peer)

    def _is_late(self, peer: int, connection: int) -> bool:
        """Return whether the session of a received message has ended, with the lock held.

        The loss is then recorded already, or waits for the lock.
        """
        return peer != self.worker_id and not self._is_open(connection)

    def when_confirmed(self, rrefs: Sequence[RRefId], resume: Callable[[], None]) -> bool:
        """Run `resume` once the owners count all these references, or cannot.

        Returns False if they count them already.
        """
        with self.lock:
            return self._confirmations.add({r for r in rrefs if self.table.state_of(r) is UserState.FORKING}, resume)

    # ---- the network

    def on_message(self, sender: int, connection: int, plain: Any) -> None:
        """Handle a protocol message of a peer."""
        with self.lock:
            if self._is_late(sender, connection):
                return
            deferred = self._apply(self.table.handle(sender, from_plain(plain)))
        self._run_deferred(deferred)

    def peer_lost(self, peer: int, why: LossReason, gone: bool) -> None:
        """Handle the end of a session.

        Args:
            peer: The peer.
            why: Why it ended, with the process.
            gone: The peer has left the group. Otherwise messages to it may begin another session.
        """
        with self.lock:
            effects = [*self.table.peer_lost(peer, why)]
            if not gone:
                effects += self.table.peer_joined(peer)
            self._set_epoch(peer, self.table.epoch_of(peer))
            deferred = self._apply(effects)
        if not self.closed:
            deferred, values = split(deferred)
            if values:  # the news of other workers wait for this function, and must not wait for user code
                self._submit(values.clear)
            del values
        self._run_deferred(deferred)

    def peer_joined(self, peer: int) -> None:
        """Handle the return of a lost worker, or of a new process with its id."""
        with self.lock:
            effects = self.table.peer_joined(peer)
            self._set_epoch(peer, self.table.epoch_of(peer))
            deferred = self._apply(effects)
        self._run_deferred(deferred)

    # ---- the end

    def release_all(self, timeout: float) -> bool:
        """Release all references to other workers' values; return False on timeout.

        Waits until their owners have confirmed, and until no other worker refers to a value of this worker.
        """
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
        return bool(stats.pending_users or stats.forks or stats.pins or self._pending)

    def stats(self) -> RRefStats:
        with self.lock:
            return self.table.stats()

    def leaks(self) -> list[Leak]:
        """Return the values that other workers still refer to."""
        with self.lock:
            return self.table.leaks()

    def close(self) -> None:
        """Release all values and resume waiting functions: the worker has closed."""
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
        """Carry out effects on tables, with the lock held; return the rest as functions."""
        if self._has_waiter:
            self._changed.notify_all()
        collects = self._collect_requested or not self._batched
        if not effects and collects:
            return _NOTHING
        deferred: list[Callable[[], None]] = []
        for effect in effects:
            if isinstance(effect, Send):
                deferred.append(
                    partial(
                        self._send,
                        effect.to,
                        as_plain(effect.message),
                        type(effect.message).__name__,
                        self.table.epoch_of(effect.to),
                    )
                )
            elif isinstance(effect, Delete):
                owned = self.values.pop(effect.rref, None)
                self._failed_here.pop(effect.rref, None)
                if owned is not None:
                    deferred.append(partial(free, owned))
            elif isinstance(effect, Confirmed):
                deferred += self._confirmations.confirm(effect.rref)
            elif isinstance(effect, Failed):
                deferred += self._confirmations.confirm(effect.rref)
                owned = self.values.get(effect.rref)
                if owned is not None and not owned.ready:
                    deferred += owned.set_result(None, self.never_arrived(effect.rref, effect.why, effect.lost))
        if not collects:  # the change has batched a message: a pool thread sends it
            self._collect_requested = True
            deferred.append(self._request_callback)
        return deferred

    def _run_deferred(self, deferred: Sequence[Callable[[], None]]) -> None:
        for action in deferred:
            action()

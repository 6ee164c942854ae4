"""Lifetime of remote references: one pure `RRefTable` per worker.

README.md has the theory.

**Usage.** Hold one lock around every call. Each method returns effects, a possibly empty sequence to execute in order.
The message of a `Send` goes to `handle` of the peer's table. Messages may arrive in any order, also between one pair of
workers. They must arrive at most once, and be lost only with their sender or receiver, which `peer_lost` reports.

- A Python RRef object is one handle. It stores `generation` when it is created. Its finalizer appends (id, generation)
  to a deque, and a thread of the worker drains the deque into `drop`.
- For each ticket in a message that arrives, call `receive`, or `discard` if the message will not be unpacked (a late
  reply, an undecodable body). For each ticket in a message that could not be sent, call `unshare`. Each ticket ends in
  exactly one of these calls.
- A call through a CONFIRMED reference needs no ticket if the caller keeps its handle until the reply has arrived. In
  every other state a ticket is needed: it makes the owner wait for a creation that the call has overtaken.
- Call `flush` when idle or before sleeping, if `needs_flush`.
- A lost worker may return (`peer_joined`), also at once: the session with it has ended, and the next one begins without
  the counts of the last. Messages of the ended session must not reach `handle` after `peer_lost`; for its tickets call
  `receive_late`, and for its creations `accept_create` with `late`. Both sides must know of the loss before they
  exchange messages again, and messages made before it must not be sent after it (`epoch_of`). Nor must those made while
  the worker was lost be sent after its return.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telegrad.protocols.rref_messages import (
    Abandon,
    Accept,
    Add,
    Added,
    Confirmed,
    Delete,
    Effect,
    Expect,
    Failed,
    Message,
    OwnerState,
    Release,
    RRefId,
    RRefProtocolError,
    Send,
    Ticket,
    TicketKind,
    UnusableRRefError,
    UserState,
)
from telegrad.protocols.rref_outbox import NOTHING, Outbox
from telegrad.protocols.rref_owner import OwnerEntry, Owners
from telegrad.protocols.rref_user import UserEntry, Users

__all__ = [
    "Abandon",
    "Accept",
    "Add",
    "Added",
    "Confirmed",
    "Delete",
    "Effect",
    "Expect",
    "Failed",
    "Leak",
    "Message",
    "OwnerState",
    "RRefId",
    "RRefProtocolError",
    "RRefStats",
    "RRefTable",
    "Release",
    "Send",
    "Ticket",
    "TicketKind",
    "UnusableRRefError",
    "UserState",
]

GRANT, RETURN, FORK, SELF = TicketKind
NOT_HELD = "this worker holds no reference to it"


class Leak(NamedTuple):
    """An owner entry of which other workers still hold tokens."""

    rref: RRefId
    tokens: dict[int, int]  # user worker -> tokens; a copy


class RRefStats(NamedTuple):
    """Snapshot of one table.

    Without references all fields are zero, except `strays` after losses.
    """

    owners: int  # entries of references owned here
    expected: int  # of these, placeholders that wait for their creation
    forks: int  # tokens that other workers hold of them
    users: int  # entries of references owned by other workers
    pending_users: int  # of these, waiting for the owner's reply: CREATING, FORKING, or FAILED by a timeout
    handles: int  # local handles of owner and user entries
    pins: int  # tickets sent and not yet accepted
    queued: int  # accepts and releases waiting for `flush`
    strays: int  # messages and drops without an entry, since the start; a bug unless peers were lost


class RRefTable:
    """The references that one worker owns and uses.

    Args:
        me: Id of this worker.
        batch: Number of accepts and releases for one peer that are sent without waiting for `flush`.
    """

    __slots__ = ("_out", "_owners", "_users", "generation", "me")

    def __init__(self, me: int, batch: int = 64) -> None:
        self.me: int = me
        self._out = Outbox(batch)
        self._owners = Owners(me, self._out)
        self._users = Users(me, self._out)
        self.generation: int = 0  # of handles created now; release_all increments it

    # ---- creation -------------------------------------------------------------------------------------------------

    def own(self, rref: RRefId) -> Sequence[Effect]:
        """Create an owned READY reference with one local handle: `RRef(value)`."""
        self._owners.create(rref, OwnerState.READY)
        return self._out.take()

    def begin_create(self, rref: RRefId, owner: int) -> Sequence[Effect]:
        """Begin a `remote()` before its message is sent: CREATING, with one local handle.

        If this worker is the owner, the owner's entry is created at once: `value_ready` or `value_failed` follows, not
        `created`.

        Raises:
            RRefProtocolError: The id is in use.
        """
        if owner == self.me:
            self._owners.create(rref, OwnerState.CREATING)
        else:
            self._users.begin_create(rref, owner)
        return self._out.take() if self._out.effects else NOTHING

    def created(self, rref: RRefId) -> Sequence[Effect]:
        """Record that the owner has confirmed a creation of this worker.

        The owner confirms after `accept_create`. The confirmation may arrive after a timeout.
        """
        self._users.created(rref)
        return self._out.take() if self._out.effects else NOTHING

    def create_failed(self, rref: RRefId, why: str, may_exist: bool) -> Sequence[Effect]:
        """Record that a creation failed for its users at this worker.

        `Failed` follows unless the reference is known to exist.

        Args:
            rref: The reference.
            why: Reason, for error texts.
            may_exist: True after a timeout: the owner may still run the creation. When the owner replies, call
                `created`, or this method again with False. False if the request was not sent, or the owner rejected it
                before `accept_create`.
        """
        self._users.create_failed(rref, why, may_exist)
        return self._out.take()

    def create_lost(self, rref: RRefId, why: str) -> Sequence[Effect]:
        """Record that the session that carried a creation has ended.

        Without effect if `peer_lost` has come first.
        """
        self._users.create_lost(rref, why)
        return self._out.take()

    def accept_create(self, rref: RRefId, creator: int, late: bool = False) -> Sequence[Effect]:
        """At the owner: accept a creation; its function will run.

        Reply to the creator after this returns.

        Args:
            rref: The reference.
            creator: The creator.
            late: The session of the request has ended: the creator holds no token.
        """
        self._owners.accept_create(rref, creator, late)
        return self._out.take() if self._out.effects else NOTHING

    def value_ready(self, rref: RRefId) -> Sequence[Effect]:
        """At the owner: record that the function returned.

        Store the value first, `Delete` may follow at once.
        """
        self._owners.finish(rref, OwnerState.READY)
        return self._out.take() if self._out.effects else NOTHING

    def value_failed(self, rref: RRefId) -> Sequence[Effect]:
        """At the owner: record that the function raised.

        The exception is kept and freed like a value.
        """
        self._owners.finish(rref, OwnerState.FAILED)
        return self._out.take()

    # ---- handles --------------------------------------------------------------------------------------------------

    def adopt(self, rref: RRefId) -> Sequence[Effect]:
        """Add a local handle to a reference that this worker holds.

        Raises:
            UnusableRRefError: This worker does not hold the reference.
        """
        self._entry(rref).handles += 1
        return self._out.take()

    def drop(self, rref: RRefId, generation: int | None = None) -> Sequence[Effect]:
        """Drop one local handle.

        Never raises, because no code can catch an exception of a finalizer.

        Args:
            rref: The reference.
            generation: The table's generation when the handle was created; None for the current one, which is correct
                if `release_all` is not used.
        """
        owner = self._owners.entries.get(rref)
        if owner is not None and owner.handles:
            self._owners.drop(rref, owner)
        elif generation is None or generation == self.generation:
            user = self._users.entries.get(rref)
            if user is not None and user.handles:
                self._users.drop(rref, user)
            else:
                self._out.strays += 1
        return self._out.take() if self._out.effects else NOTHING

    def release_all(self) -> Sequence[Effect]:
        """Drop every user handle at shutdown and start a new generation.

        Later drops of the old handles, by their finalizers, have no effect. Handles to references that this worker owns
        do not change.
        """
        self.generation += 1
        for rref, entry in list(self._users.entries.items()):
            if entry.handles:
                entry.handles = 1
                self._users.drop(rref, entry)
        return self._out.take()

    # ---- tickets --------------------------------------------------------------------------------------------------

    def share(self, rref: RRefId, to: int, epoch: int | None = None) -> Ticket:
        """Create a ticket for a message to `to`, while a local handle exists.

        Returns no effects.

        Args:
            rref: The reference.
            to: The receiver.
            epoch: Epoch of the message (`epoch_of`); None for the present one. If it has ended, the message will not be
                sent: its ticket counts nothing.

        Raises:
            UnusableRRefError: This worker does not hold the reference, or uses it and it is FAILED or LOST.
        """
        user = self._users.entries.get(rref)
        if user is not None:
            return self._users.share(rref, user, to, SELF if to == self.me else None, epoch)
        owner = self._owners.entries.get(rref)
        if owner is None:
            raise UnusableRRefError(rref, NOT_HELD, False)
        return self._owners.grant(rref, owner, to, epoch)

    def unshare(self, ticket: Ticket, to: int) -> Sequence[Effect]:
        """Take back the ticket of a message that was not sent.

        Once per ticket; allowed after the loss of `to`.
        """
        if ticket.kind == GRANT:
            self._owners.ungrant(ticket, to)
        elif ticket.transfer:
            self._users.unpin(ticket.transfer, to)
        elif ticket.kind == SELF:
            self._owners.drop(ticket.rref, self._owners.entries[ticket.rref])
        return self._out.take()

    def receive(self, ticket: Ticket, sender: int) -> Sequence[Effect]:
        """Add a local handle for a ticket that arrived.

        `state_of` returns its state. Never raises.
        """
        rref, owner, kind, transfer = ticket
        if kind == FORK:
            self._users.receive_fork(rref, owner, sender, transfer)
        elif kind == RETURN:
            self._owners.receive_return(rref, sender, transfer)
        elif kind == GRANT:
            self._users.receive_grant(rref, owner)
        elif transfer:
            self._users.receive_self(rref, transfer)
        return self._out.take()

    def receive_late(self, ticket: Ticket, why: str) -> Sequence[Effect]:
        """Add a local handle for a ticket of an ended session.

        The ticket counts nothing any more.
        The handle is LOST unless this worker holds the reference otherwise.
        """
        if ticket.owner == self.me:
            self._owners.receive_late(ticket.rref, why)
        else:
            self._users.receive_late(ticket.rref, ticket.owner, why)
        return self._out.take()

    def discard(self, ticket: Ticket, sender: int) -> Sequence[Effect]:
        """Receive and drop a ticket of a message that will not be unpacked."""
        return (*self.receive(ticket, sender), *self.drop(ticket.rref))

    # ---- peers ----------------------------------------------------------------------------------------------------

    def handle(self, sender: int, message: Message) -> Sequence[Effect]:
        """Process a message from the table of `sender`."""
        if isinstance(message, Release):
            for rref, tokens in message.items:
                self._owners.on_release(sender, rref, tokens)
        elif isinstance(message, Accept):
            for transfer in message.transfers:
                self._users.unpin(transfer, sender)
        elif isinstance(message, Add):
            self._owners.on_add(sender, message.rref)
        elif isinstance(message, Added):
            self._users.on_added(message.rref)
        elif isinstance(message, Expect):
            self._users.on_expect(sender, message)
        else:
            self._owners.on_abandon(message)
        return self._out.take()

    def is_lost(self, worker: int) -> bool:
        """Return whether a worker is lost and has not returned."""
        return worker in self._out.lost

    def peer_lost(self, worker: int, why: str) -> Sequence[Effect]:
        """Drop the tokens and pins of a lost worker.

        References that it owned, and placeholders of its creations, become LOST.
        """
        if worker not in self._out.lost:
            self._out.forget(worker, why)
            self._owners.peer_lost(worker, why)
            self._users.peer_lost(worker, why)
        return self._out.take()

    def peer_joined(self, worker: int) -> Sequence[Effect]:
        """Allow messages to a lost worker that is back, or to its new incarnation.

        Its earlier state is not restored. A new epoch begins: tickets made since the loss count nothing.
        """
        self._out.resume(worker)
        return self._out.take()

    def epoch_of(self, worker: int) -> int:
        """Return the epoch of messages to a worker: its losses and returns so far.

        Messages that were made in an earlier epoch are not to be sent.
        """
        return self._out.epochs.get(worker, 0)

    def flush(self) -> Sequence[Effect]:
        """Return the batched accepts and releases as messages to send."""
        self._out.flush()
        return self._out.take()

    @property
    def needs_flush(self) -> bool:
        return bool(self._out.batched)

    @property
    def batched(self) -> Mapping[int, object]:
        """The batches per peer; empty unless `needs_flush`.

        Always the same object, so callers may keep it.
        """
        return self._out.batched

    # ---- questions ------------------------------------------------------------------------------------------------

    def state_of(self, rref: RRefId) -> OwnerState | UserState | None:
        """Return the state of the reference, or None if the table has no entry of it.

        It is an OwnerState if this worker owns the reference, else a UserState.
        """
        entry = self._users.entries.get(rref) or self._owners.entries.get(rref)
        return None if entry is None else entry.state

    def failure_of(self, rref: RRefId) -> tuple[str, bool] | None:
        """Return (why, lost) of an entry that has `Failed`, else None.

        FAILED at the owner is not a failure in this sense: the entry has an exception as its value.
        """
        entry = self._users.entries.get(rref) or self._owners.entries.get(rref)
        return None if entry is None else entry.failure

    def leaks(self) -> list[Leak]:
        """Return owned references that other workers hold, in the order of creation."""
        return [Leak(rref, dict(entry.tokens)) for rref, entry in self._owners.entries.items() if entry.tokens]

    def size(self) -> int:
        """Return the number of references."""
        return len(self._owners.entries) + len(self._users.entries)

    def stats(self) -> RRefStats:
        owners = self._owners.entries.values()
        users = self._users.entries.values()
        return RRefStats(
            owners=len(owners),
            expected=sum(entry.state is OwnerState.EXPECTED for entry in owners),
            forks=sum(sum(entry.tokens.values()) for entry in owners),
            users=len(users),
            pending_users=sum(entry.creating or entry.adding for entry in users),
            handles=sum(entry.handles for entry in owners) + sum(entry.handles for entry in users),
            pins=len(self._users.transfers),
            queued=self._out.queued(),
            strays=self._out.strays,
        )

    def _entry(self, rref: RRefId) -> OwnerEntry | UserEntry:
        entry = self._users.entries.get(rref) or self._owners.entries.get(rref)
        if entry is None:
            raise UnusableRRefError(rref, NOT_HELD, False)
        return entry

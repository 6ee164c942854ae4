"""Lifetime of remote references: one `RRefTable` per worker, pure and single-threaded (theory: README.md).

How to drive it. Hold one lock around every call. Each method returns effects, a possibly empty sequence to carry out in
order; `Send`s go to the peer's `handle`. Any order of delivery is fine, also between one pair of workers; messages must
arrive at most once, and be lost only together with their sender or receiver, which `peer_lost` reports.

- A Python RRef object is one handle. It notes `generation` when it is made; its finalizer appends (id, generation) to a
  deque, and somebody drains that into `drop`.
- Every ticket of a message that arrives is `receive`d, or `discard`ed where nobody will unpack it (a late reply, an
  undecodable body). Every ticket of a message that could not leave is `unshare`d. Nothing else may happen to a ticket.
- A call through a CONFIRMED reference needs no ticket for it if the caller keeps its handle until the reply is there.
  In every other state send one: it makes the owner wait for a creation that the call has overtaken.
- Call `flush` when idle or about to sleep, whenever `needs_flush`.
- A worker that was lost may return under its old id: `peer_joined`. From `peer_lost` on nothing of the old incarnation
  may reach the machine, and each side must have been told of the loss before the two talk again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .rref_messages import (
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
from .rref_outbox import NOTHING, Outbox
from .rref_owner import OwnerEntry, Owners
from .rref_user import UserEntry, Users

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
    """An owner entry that other workers still count on."""

    rref: RRefId
    tokens: dict[int, int]  # user worker -> tokens; a copy


class RRefStats(NamedTuple):
    """A snapshot of one table. All zero (`strays` apart, after losses) when nothing is referred to any more."""

    owners: int  # entries of references owned here
    expected: int  # of these, placeholders whose creation has not arrived
    forks: int  # tokens that other workers hold of them
    users: int  # entries of references owned elsewhere
    pending_users: int  # of these, waiting for the owner's word: CREATING, FORKING, or FAILED by a time-out
    handles: int  # local handles, of both sorts
    pins: int  # tickets sent to be accepted
    queued: int  # accepts and releases waiting for `flush`
    strays: int  # messages and drops that referred to nothing, since the start; a bug unless peers were lost


class RRefTable:
    """The references that one worker owns and uses.

    `batch`: as many accepts and releases collected for one peer leave without waiting for `flush`.
    """

    __slots__ = ("_out", "_owners", "_users", "generation", "me")

    def __init__(self, me: int, batch: int = 64) -> None:
        self.me: int = me
        self._out = Outbox(batch)
        self._owners = Owners(me, self._out)
        self._users = Users(me, self._out)
        self.generation: int = 0  # of the handles made now; release_all ends one

    # ---- creation -------------------------------------------------------------------------------------------------

    def own(self, rref: RRefId) -> Sequence[Effect]:
        """`RRef(value)`: a READY reference of my own, one local handle."""
        self._owners.create(rref, OwnerState.READY)
        return self._out.take()

    def begin_create(self, rref: RRefId, owner: int) -> Sequence[Effect]:
        """`remote()`, before its message leaves: one local handle, CREATING.

        With `owner` == me the owner's entry is made at once; go on with `value_ready` or `value_failed`, not `created`.
        Raises RRefProtocolError if the id is in use.
        """
        if owner == self.me:
            self._owners.create(rref, OwnerState.CREATING)
        else:
            self._users.begin_create(rref, owner)
        return self._out.take() if self._out.effects else NOTHING

    def created(self, rref: RRefId) -> Sequence[Effect]:
        """The owner has confirmed my creation (its `accept_create` ran), be it after a time-out."""
        self._users.created(rref)
        return self._out.take() if self._out.effects else NOTHING

    def create_failed(self, rref: RRefId, why: str, may_exist: bool) -> Sequence[Effect]:
        """My creation failed for its users here; `Failed` follows unless it is known to exist.

        may_exist=True: the owner may carry it out yet (a time-out). `created` must still be called when its word comes,
        or this again with False. may_exist=False: it never left, or the owner refused it before `accept_create`.
        """
        self._users.create_failed(rref, why, may_exist)
        return self._out.take()

    def accept_create(self, rref: RRefId, creator: int) -> Sequence[Effect]:
        """Owner: a creation arrived and its function will run. Answer the creator once this returned, or later."""
        self._owners.accept_create(rref, creator)
        return self._out.take() if self._out.effects else NOTHING

    def value_ready(self, rref: RRefId) -> Sequence[Effect]:
        """Owner: the function returned; put the value in place first, `Delete` may follow at once."""
        self._owners.finish(rref, OwnerState.READY)
        return self._out.take() if self._out.effects else NOTHING

    def value_failed(self, rref: RRefId) -> Sequence[Effect]:
        """Owner: the function raised; the exception is kept and freed like a value."""
        self._owners.finish(rref, OwnerState.FAILED)
        return self._out.take()

    # ---- handles --------------------------------------------------------------------------------------------------

    def adopt(self, rref: RRefId) -> Sequence[Effect]:
        """One more local handle to a reference this worker holds. Raises UnusableRRefError if it holds none."""
        self._entry(rref).handles += 1
        return self._out.take()

    def drop(self, rref: RRefId, generation: int | None = None) -> Sequence[Effect]:
        """One local handle is gone. Never raises, since nobody could catch what a finalizer's drop raises.

        `generation`: the table's when the handle was made; None means the present one, which is right as long as
        `release_all` is not used.
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
        """Shutdown: drops every user handle there is and starts a new generation.

        The old handles' own drops, which finalizers may bring at any later time or never, count for nothing. Handles to
        what this worker owns are not touched.
        """
        self.generation += 1
        for rref, entry in list(self._users.entries.items()):
            if entry.handles:
                entry.handles = 1
                self._users.drop(rref, entry)
        return self._out.take()

    # ---- tickets --------------------------------------------------------------------------------------------------

    def share(self, rref: RRefId, to: int) -> Ticket:
        """A ticket to put into a message to `to`, made while a local handle exists. Has no effects.

        Raises UnusableRRefError for a reference that is not held here, or FAILED or LOST here as a user.
        """
        user = self._users.entries.get(rref)
        if user is not None:
            return self._users.share(rref, user, to, SELF if to == self.me else None)
        owner = self._owners.entries.get(rref)
        if owner is None:
            raise UnusableRRefError(rref, NOT_HELD, False)
        return self._owners.grant(rref, owner, to)

    def unshare(self, ticket: Ticket, to: int) -> Sequence[Effect]:
        """The message with this ticket never left for `to`. Once per ticket; harmless if `to` was lost meanwhile."""
        if ticket.kind == GRANT:
            self._owners.ungrant(ticket, to)
        elif ticket.transfer:
            self._users.unpin(ticket.transfer, to)
        elif ticket.kind == SELF:
            self._owners.drop(ticket.rref, self._owners.entries[ticket.rref])
        return self._out.take()

    def receive(self, ticket: Ticket, sender: int) -> Sequence[Effect]:
        """A ticket arrived: there is one new local handle, whatever its state (`state_of` tells). Never raises."""
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

    def discard(self, ticket: Ticket, sender: int) -> Sequence[Effect]:
        """A ticket arrived in a message that nobody will unpack: the reference is received and dropped."""
        return (*self.receive(ticket, sender), *self.drop(ticket.rref))

    # ---- peers ----------------------------------------------------------------------------------------------------

    def handle(self, sender: int, message: Message) -> Sequence[Effect]:
        """A message from `sender`'s machine."""
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

    def peer_lost(self, worker: int, why: str) -> Sequence[Effect]:
        """`worker` is dead for me. Its tokens and pins go; what it owned, or was yet to create here, is LOST."""
        if worker not in self._out.lost:
            self._out.forget(worker, why)
            self._owners.peer_lost(worker, why)
            self._users.peer_lost(worker, why)
        return self._out.take()

    def peer_joined(self, worker: int) -> Sequence[Effect]:
        """A new incarnation of a lost worker is there. Nothing that the old one had comes back."""
        self._out.lost.pop(worker, None)
        return self._out.take()

    def flush(self) -> Sequence[Effect]:
        """Sends what was batched."""
        self._out.flush()
        return self._out.take()

    @property
    def needs_flush(self) -> bool:
        return bool(self._out.batched)

    @property
    def batched(self) -> Mapping[int, object]:
        """Empty unless `needs_flush`; always the same object, for who asks often."""
        return self._out.batched

    # ---- questions ------------------------------------------------------------------------------------------------

    def state_of(self, rref: RRefId) -> OwnerState | UserState | None:
        """UserState if another worker owns it, OwnerState if I do, None if this worker knows nothing of it."""
        entry = self._users.entries.get(rref) or self._owners.entries.get(rref)
        return None if entry is None else entry.state

    def failure_of(self, rref: RRefId) -> tuple[str, bool] | None:
        """(why, lost) of an entry that has `Failed`, else None. An owner's FAILED is a value, not a failure here."""
        entry = self._users.entries.get(rref) or self._owners.entries.get(rref)
        return None if entry is None else entry.failure

    def leaks(self) -> list[Leak]:
        """What other workers still hold of mine, in the order of creation."""
        return [Leak(rref, dict(entry.tokens)) for rref, entry in self._owners.entries.items() if entry.tokens]

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

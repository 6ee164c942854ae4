"""User part of the RRef protocol: an entry per reference of another worker.

    begin_create --> CREATING --created--> CONFIRMED          receive(FORK) --> FORKING --Added--> CONFIRMED
                         `----create_failed--> FAILED         receive(GRANT) --> CONFIRMED
    any, when the owner is lost --> LOST                      receive(GRANT) makes CREATING and FORKING CONFIRMED too

An entry counts its local `handles`, its `pins` (tickets sent and not yet accepted) and the `tokens` that the owner has
counted for this worker. FAILED and LOST are final for the entry. Once handles and pins are zero and no reply of the
owner is pending (invariant U1), the entry ends and releases all tokens.
"""

from telegrad.protocols.rref_messages import (
    Abandon,
    Add,
    Confirmed,
    Expect,
    Failed,
    RRefId,
    RRefProtocolError,
    Ticket,
    TicketKind,
    UnusableRRefError,
    UserState,
)
from telegrad.protocols.rref_outbox import Outbox

CREATING, FORKING, CONFIRMED, FAILED, LOST = UserState
RETURN, FORK = TicketKind.RETURN, TicketKind.FORK

NOT_CREATING = "it is from a connection that has ended"


class UserEntry:
    __slots__ = ("adding", "asked", "creating", "failure", "handles", "owner", "parents", "pins", "state", "tokens")

    def __init__(self, owner: int, state: UserState, handles: int) -> None:
        self.owner: int = owner
        self.state: UserState = state
        self.handles: int = handles
        self.pins: int = 0
        self.tokens: int = 0
        self.creating: bool = False  # the owner may still confirm the creation (also FAILED after a timeout)
        self.adding: bool = False  # an Add without its Added
        self.asked: bool = False  # the owner has asked (Expect) for the creation
        self.parents: list[tuple[int, int]] = []  # (sender, transfer) to accept once this worker holds a token
        self.failure: tuple[str, bool] | None = None  # (why, lost) when FAILED or LOST


class Users:
    """User entries of one worker. Methods leave their effects in the outbox."""

    __slots__ = ("_me", "_next_transfer", "_out", "entries", "transfers")

    def __init__(self, me: int, out: Outbox) -> None:
        self._me = me
        self._out = out
        self._next_transfer = 1
        self.entries: dict[RRefId, UserEntry] = {}
        self.transfers: dict[int, tuple[RRefId, int]] = {}  # pin -> (reference, receiver)

    # ---- creation -------------------------------------------------------------------------------------------------

    def begin_create(self, rref: RRefId, owner: int) -> None:
        if rref in self.entries:
            raise RRefProtocolError(f"{rref} exists already")
        entry = self.entries[rref] = UserEntry(owner, CREATING, handles=1)
        if owner in self._out.lost:
            self._lose(rref, entry, self._out.lost[owner])
        else:
            entry.creating = True

    def create_lost(self, rref: RRefId, why: str) -> None:
        entry = self.entries.get(rref)
        if entry is not None and entry.creating:
            self._lose(rref, entry, why)
            self._settle(rref, entry)

    def created(self, rref: RRefId) -> None:
        entry = self.entries.get(rref)
        if entry is None or not entry.creating:
            return  # the owner was lost meanwhile
        entry.creating = False
        self._gain(rref, entry)

    def create_failed(self, rref: RRefId, why: str, may_exist: bool) -> None:
        entry = self.entries.get(rref)
        if entry is None or not entry.creating:
            return  # the owner was lost meanwhile
        if entry.state is CREATING:
            entry.state = FAILED
            entry.failure = (why, False)
            self._out.emit(Failed(rref, why, False))
        if not may_exist:
            entry.creating = False
            if entry.asked:
                self._out.send(entry.owner, Abandon(rref, why))
            self._settle(rref, entry)

    # ---- handles and tickets --------------------------------------------------------------------------------------

    def drop(self, rref: RRefId, entry: UserEntry) -> None:
        entry.handles -= 1
        if not entry.handles:
            self._settle(rref, entry)

    def share(
        self, rref: RRefId, entry: UserEntry, to: int, kind: TicketKind | None, epoch: int | None = None
    ) -> Ticket:
        if entry.failure is not None:
            raise UnusableRRefError(rref, *entry.failure)
        owner = entry.owner
        if kind is None:
            kind = RETURN if to == owner else FORK
        if not self._out.delivers(to, epoch):
            return Ticket(rref, owner, kind, 0)  # will not be delivered, so it would never be accepted
        transfer = self._next_transfer
        self._next_transfer = transfer + 1
        self.transfers[transfer] = (rref, to)
        entry.pins += 1
        return Ticket(rref, owner, kind, transfer)

    def unpin(self, transfer: int, to: int) -> None:
        """Drop the pin of a transfer that `to` has accepted, or that was not sent."""
        what = self.transfers.get(transfer)
        if what is None or what[1] != to:
            if transfer:  # 0 was never a pin
                self._out.strays += 1
            return
        del self.transfers[transfer]
        rref = what[0]
        entry = self.entries[rref]
        entry.pins -= 1
        if not entry.pins:
            self._settle(rref, entry)

    def receive_grant(self, rref: RRefId, owner: int) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = UserEntry(owner, CONFIRMED, handles=0)
        entry.handles += 1
        self._gain(rref, entry)

    def receive_fork(self, rref: RRefId, owner: int, sender: int, transfer: int) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = UserEntry(owner, FORKING, handles=1)
            if owner not in self._out.lost:
                entry.adding = True
                entry.parents.append((sender, transfer))
                self._out.send(owner, Add(rref))
                return
            self._lose(rref, entry, self._out.lost[owner])
        else:
            entry.handles += 1
            if entry.state is FORKING:
                entry.parents.append((sender, transfer))
                return
        # CONFIRMED has a token, CREATING will get one, FAILED and LOST need none: the sender may drop its pin.
        self._out.accept(sender, transfer)

    def receive_late(self, rref: RRefId, owner: int, why: str) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = UserEntry(owner, FORKING, handles=0)
            self._lose(rref, entry, why)
        entry.handles += 1

    def receive_self(self, rref: RRefId, transfer: int) -> None:
        self.entries[rref].handles += 1
        self.unpin(transfer, self._me)

    # ---- messages -------------------------------------------------------------------------------------------------

    def on_added(self, rref: RRefId) -> None:
        entry = self.entries.get(rref)
        if entry is None or not entry.adding:
            self._out.strays += 1
            return
        entry.adding = False
        self._gain(rref, entry)

    def on_expect(self, sender: int, message: Expect) -> None:
        entry = self.entries.get(message.rref)
        if entry is not None and entry.creating:
            entry.asked = True
            return
        failure = (NOT_CREATING, True) if entry is None or entry.failure is None else entry.failure
        self._out.send(sender, Abandon(message.rref, *failure))

    def peer_lost(self, peer: int, why: str) -> None:
        orphans = {rref for rref, entry in self.entries.items() if entry.owner == peer}
        for transfer, (rref, to) in list(self.transfers.items()):
            if to == peer or (rref in orphans and to != self._me):  # a SELF ticket will still be received
                del self.transfers[transfer]
                self.entries[rref].pins -= 1
        for rref, entry in list(self.entries.items()):
            if entry.parents:
                entry.parents = [parent for parent in entry.parents if parent[0] != peer]
            if rref in orphans:
                self._lose(rref, entry, why)
            self._settle(rref, entry)

    # ---- rules ----------------------------------------------------------------------------------------------------

    def _gain(self, rref: RRefId, entry: UserEntry) -> None:
        """Record that the owner has counted one more token for this worker."""
        entry.tokens += 1
        if entry.state is CREATING or entry.state is FORKING:
            entry.state = CONFIRMED
            self._out.emit(Confirmed(rref))
            if entry.parents:
                self._accept_parents(entry)
        self._settle(rref, entry)

    def _lose(self, rref: RRefId, entry: UserEntry, why: str) -> None:
        entry.creating = entry.adding = False
        entry.tokens = 0
        self._accept_parents(entry)  # they may not know of the loss yet
        if entry.failure is None:
            entry.state = LOST
            entry.failure = (why, True)
            self._out.emit(Failed(rref, why, True))

    def _accept_parents(self, entry: UserEntry) -> None:
        for sender, transfer in entry.parents:
            self._out.accept(sender, transfer)
        entry.parents.clear()

    def _settle(self, rref: RRefId, entry: UserEntry) -> None:
        if entry.handles or entry.pins or entry.creating or entry.adding:
            return  # also if it has failed: the owner keeps the value as long as a worker references it
        if entry.tokens:
            self._out.release(entry.owner, rref, entry.tokens)
        del self.entries[rref]

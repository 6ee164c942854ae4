"""Owner part of the RRef protocol: one entry per reference that this worker owns.

    EXPECTED --accept_create--> CREATING --value_ready--> READY
        |                           `------value_failed--> FAILED
        `--Abandon, or the creator is lost--> LOST (--accept_create--> CREATING, if the creator had returned)

An entry ends, with `Delete`, as soon as no worker holds a token of it, no local handle is left and its function does
not run (invariant O1). The creation adds the entry, or the first reference to it if that arrives earlier.
"""

from telegrad.protocols.rref_messages import (
    Abandon,
    Added,
    Delete,
    Expect,
    Failed,
    OwnerState,
    RRefId,
    RRefProtocolError,
    Ticket,
    TicketKind,
)
from telegrad.protocols.rref_outbox import Outbox

EXPECTED, CREATING, READY, FAILED, LOST = OwnerState
GRANT, SELF = TicketKind.GRANT, TicketKind.SELF

DELETED = "it has been deleted by its owner"


class OwnerEntry:
    __slots__ = ("failure", "handles", "state", "tokens")

    def __init__(self, state: OwnerState, handles: int) -> None:
        self.state: OwnerState = state
        self.handles: int = handles  # local handles, received RETURN tickets among them
        self.tokens: dict[int, int] = {}  # user worker -> tokens it holds or is about to receive; never 0 (O2)
        self.failure: tuple[str, bool] | None = None  # (why, lost) when LOST


class Owners:
    """Owner entries of one worker. Methods leave their effects in the outbox."""

    __slots__ = ("_me", "_out", "entries")

    def __init__(self, me: int, out: Outbox) -> None:
        self._me = me
        self._out = out
        self.entries: dict[RRefId, OwnerEntry] = {}

    # ---- creation -------------------------------------------------------------------------------------------------

    def create(self, rref: RRefId, state: OwnerState) -> None:
        """Create an owned reference with one local handle.

        Its state is READY for `RRef(value)`, and CREATING for `remote()` to this worker itself.
        """
        if rref in self.entries:
            raise RRefProtocolError(f"{rref} exists already")
        self.entries[rref] = OwnerEntry(state, handles=1)

    def accept_create(self, rref: RRefId, creator: int, late: bool) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = OwnerEntry(CREATING, handles=0)
        elif entry.state is EXPECTED:
            entry.state = CREATING
        elif entry.failure is not None and entry.failure[1]:
            # The first reference arrived before this worker knew of the creator's return, and was attributed to the
            # lost incarnation.
            entry.state = CREATING
            entry.failure = None
        else:
            raise RRefProtocolError(f"{rref} was created twice")
        if not late and creator not in self._out.lost:
            entry.tokens[creator] = entry.tokens.get(creator, 0) + 1

    def finish(self, rref: RRefId, state: OwnerState) -> None:
        entry = self.entries.get(rref)
        if entry is None or entry.state is not CREATING:
            raise RRefProtocolError(f"{rref} is not being created here")
        entry.state = state
        self._settle(rref, entry)

    # ---- handles and tickets --------------------------------------------------------------------------------------

    def drop(self, rref: RRefId, entry: OwnerEntry) -> None:
        entry.handles -= 1
        if not entry.handles:
            self._settle(rref, entry)

    def grant(self, rref: RRefId, entry: OwnerEntry, to: int, epoch: int | None = None) -> Ticket:
        """Count a token and return its ticket.

        The token is counted before the ticket is sent, so a Release never arrives before its token is counted (O3).
        """
        if to == self._me:
            entry.handles += 1  # the handle of the receiver, counted in advance
            return Ticket(rref, to, SELF, 0)
        if not self._out.delivers(to, epoch):
            return Ticket(rref, self._me, GRANT, -1)  # will not be delivered, so there is nothing to count
        entry.tokens[to] = entry.tokens.get(to, 0) + 1
        return Ticket(rref, self._me, GRANT, self._out.epochs.get(to, 0))

    def ungrant(self, ticket: Ticket, to: int) -> None:
        # A peer that was lost since then has no tokens left, and the ticket must not touch those of its next
        # incarnation.
        if ticket.transfer == self._out.epochs.get(to, 0) and to not in self._out.lost:
            self.on_release(to, ticket.rref, 1)

    def receive_return(self, rref: RRefId, sender: int, transfer: int) -> None:
        entry = self.entries.get(rref) or self._expect(rref)
        entry.handles += 1
        self._out.accept(sender, transfer)

    def receive_late(self, rref: RRefId, why: str) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = OwnerEntry(EXPECTED, handles=0)
            self._lose(rref, entry, why, lost=True)
        entry.handles += 1

    # ---- messages -------------------------------------------------------------------------------------------------

    def on_add(self, sender: int, rref: RRefId) -> None:
        if sender in self._out.lost:
            return
        entry = self.entries.get(rref) or self._expect(rref)
        entry.tokens[sender] = entry.tokens.get(sender, 0) + 1
        self._out.send(sender, Added(rref))

    def on_release(self, sender: int, rref: RRefId, tokens: int) -> None:
        entry = self.entries.get(rref)
        held = entry.tokens.get(sender, 0) if entry is not None else 0
        if entry is None or held < tokens:
            self._out.strays += 1
            if entry is None or not held:
                return
        if held > tokens:
            entry.tokens[sender] = held - tokens
            return
        del entry.tokens[sender]
        self._settle(rref, entry)

    def on_abandon(self, message: Abandon) -> None:
        entry = self.entries.get(message.rref)
        if entry is not None and entry.state is EXPECTED:
            self._lose(message.rref, entry, message.why, message.lost)

    def peer_lost(self, peer: int, why: str) -> None:
        for rref, entry in list(self.entries.items()):
            if entry.state is EXPECTED and rref.created_on == peer:
                self._lose(rref, entry, why, lost=True)
            entry.tokens.pop(peer, None)
            self._settle(rref, entry)

    # ---- rules ----------------------------------------------------------------------------------------------------

    def _expect(self, rref: RRefId) -> OwnerEntry:
        """Add a placeholder for an unknown reference.

        The reference is not created yet, or was deleted after a loss. Without losses it is always the former, because a
        parent outlives its child's Add (G2). Only the creator knows, so the owner asks it (`Expect`) and keeps no
        record of deleted references.
        """
        entry = self.entries[rref] = OwnerEntry(EXPECTED, handles=0)
        creator = rref.created_on
        if creator == self._me:
            self._lose(rref, entry, DELETED, lost=True)
        elif creator in self._out.lost:
            self._lose(rref, entry, self._out.lost[creator], lost=True)
        else:
            self._out.send(creator, Expect(rref))
        return entry

    def _lose(self, rref: RRefId, entry: OwnerEntry, why: str, lost: bool) -> None:
        entry.state = LOST
        entry.failure = (why, lost)
        self._out.emit(Failed(rref, why, lost))

    def _settle(self, rref: RRefId, entry: OwnerEntry) -> None:
        if entry.tokens or entry.handles or entry.state is CREATING:
            return
        del self.entries[rref]
        self._out.emit(Delete(rref))

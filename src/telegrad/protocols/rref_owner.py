"""The owner's half of the RRef protocol: one entry per reference whose value lives here.

    EXPECTED --accept_create--> CREATING --value_ready--> READY
        |                           `------value_failed--> FAILED
        `--Abandon, or the creator is lost--> LOST (--accept_create--> CREATING, if the creator was back after all)

An entry ends, with `Delete`, as soon as no worker holds a token of it, no local handle is left and its function does
not run (invariant O1). An entry is made by its creation, or by the first reference to it if that comes first.
"""

from .rref_messages import (
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
from .rref_outbox import Outbox

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
    """All owner entries of one worker. Methods leave their effects in the outbox."""

    __slots__ = ("_me", "_out", "entries")

    def __init__(self, me: int, out: Outbox) -> None:
        self._me = me
        self._out = out
        self.entries: dict[RRefId, OwnerEntry] = {}

    # ---- creation -------------------------------------------------------------------------------------------------

    def create(self, rref: RRefId, state: OwnerState) -> None:
        """A reference of my own with one local handle: READY (`RRef(value)`) or CREATING (remote to self)."""
        if rref in self.entries:
            raise RRefProtocolError(f"{rref} exists already")
        self.entries[rref] = OwnerEntry(state, handles=1)

    def accept_create(self, rref: RRefId, creator: int) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            entry = self.entries[rref] = OwnerEntry(CREATING, handles=0)
        elif entry.state is EXPECTED:
            entry.state = CREATING
        elif entry.failure is not None and entry.failure[1]:
            # The first reference came before I heard that a lost creator is back, so I took it for a dead one's.
            entry.state = CREATING
            entry.failure = None
        else:
            raise RRefProtocolError(f"{rref} was created twice")
        if creator not in self._out.lost:
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

    def grant(self, rref: RRefId, entry: OwnerEntry, to: int) -> Ticket:
        """Counts the token before the ticket leaves, so a Release can never arrive ahead of what it releases (O3)."""
        if to == self._me:
            entry.handles += 1  # the receiver's, made ahead
            return Ticket(rref, to, SELF, 0)
        if to in self._out.lost:
            return Ticket(rref, self._me, GRANT, -1)  # will not be delivered, so there is nothing to count
        entry.tokens[to] = entry.tokens.get(to, 0) + 1
        return Ticket(rref, self._me, GRANT, self._out.epochs.get(to, 0))

    def ungrant(self, ticket: Ticket, to: int) -> None:
        # A peer that was lost since has lost its tokens too; its next incarnation's are none of this ticket's business.
        if ticket.transfer == self._out.epochs.get(to, 0) and to not in self._out.lost:
            self.on_release(to, ticket.rref, 1)

    def receive_return(self, rref: RRefId, sender: int, transfer: int) -> None:
        entry = self.entries.get(rref) or self._expect(rref)
        entry.handles += 1
        self._out.accept(sender, transfer)

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
            self._lose(message.rref, entry, message.why, lost=False)

    def peer_lost(self, peer: int, why: str) -> None:
        for rref, entry in list(self.entries.items()):
            if entry.state is EXPECTED and rref.created_on == peer:
                self._lose(rref, entry, why, lost=True)
            entry.tokens.pop(peer, None)
            self._settle(rref, entry)

    # ---- rules ----------------------------------------------------------------------------------------------------

    def _expect(self, rref: RRefId) -> OwnerEntry:
        """Somebody refers to what I do not know: its creation is still to come, or it was deleted after a loss.

        Without losses it is always the former (a parent outlives its child's Add, G2). Only the creator can tell, so
        it is asked; I need no memory of what I deleted.
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

"""Vocabulary of the RRef protocol: ids, tickets, messages, effects, states.

Everything here is plain data. What goes over the wire is `Ticket` (inside a user's message, but in its header, so that
it can be honoured without unpickling anything) and the messages of `Message`. `Effect` is what a machine asks its glue
to do. They are named tuples: cheap to build, and easy for a codec to write field by field. Two kinds with equal fields
compare equal as tuples, so tell them apart by type.
"""

from enum import IntEnum
from typing import NamedTuple


class RRefId(NamedTuple):
    """Names one remote reference in the whole group, for ever.

    The creator chooses `local_id`; it must never use one twice, nor one that an earlier incarnation of the same worker
    id may have used (start each incarnation at `incarnation << 32`, say).
    """

    created_on: int  # worker id of the creator, which need not be the owner
    local_id: int


class TicketKind(IntEnum):
    """Who hands a reference to whom, which decides how the owner's count is kept right."""

    GRANT = 0  # owner -> user: the owner has counted a token for the receiver already
    RETURN = 1  # user -> owner: the sender keeps its token until the owner accepts
    FORK = 2  # user -> another user: the sender keeps its token until the receiver has one of its own
    SELF = 3  # to oneself: the present entry is kept until the ticket is received


class Ticket(NamedTuple):
    """A reference on its way inside a message. Each one is received, discarded or unshared exactly once."""

    rref: RRefId
    owner: int
    kind: TicketKind
    transfer: int  # RETURN, FORK, SELF: names the pin at the sender, or 0. GRANT: private to the sender


# ---- messages between machines ------------------------------------------------------------------------------------


class Add(NamedTuple):
    """User -> owner: count one token for me. Answered by `Added`, always."""

    rref: RRefId


class Added(NamedTuple):
    """Owner -> user: one token is counted for you (though the value may have failed: ask for it and you will hear)."""

    rref: RRefId


class Accept(NamedTuple):
    """Receiver of RETURN and FORK tickets -> their sender: your pins may go."""

    transfers: tuple[int, ...]


class Release(NamedTuple):
    """User -> owner: take so many tokens off my count."""

    items: tuple[tuple[RRefId, int], ...]


class Expect(NamedTuple):
    """Owner -> creator: somebody referred to this, but I have not seen its creation. Will it come?

    Answered by silence while the creation is under way, else (at once, or once it has failed) by `Abandon`.
    """

    rref: RRefId


class Abandon(NamedTuple):
    """Creator -> owner: no creation of this reference is on its way to you, and none ever will be."""

    rref: RRefId
    why: str


Message = Add | Added | Accept | Release | Expect | Abandon

# ---- effects: what the glue must do, in this order ----------------------------------------------------------------


class Send(NamedTuple):
    to: int
    message: Message


class Delete(NamedTuple):
    """The owner's entry is gone: free the value if there is one, and fail whoever still waits for it."""

    rref: RRefId


class Confirmed(NamedTuple):
    """This user's entry, which was CREATING or FORKING, now holds a token of its own."""

    rref: RRefId


class Failed(NamedTuple):
    """The local entry has become unusable for good: FAILED at a user, LOST at a user or at the owner."""

    rref: RRefId
    why: str
    lost: bool  # a worker's death is the cause (owner, creator, or a link in the chain of forks)


Effect = Send | Delete | Confirmed | Failed

# ---- states -------------------------------------------------------------------------------------------------------


class OwnerState(IntEnum):
    EXPECTED = 0  # a placeholder: referred to before its creation arrived
    CREATING = 1  # its function runs; the entry cannot end
    READY = 2  # holds a value
    FAILED = 3  # holds an exception, shared and counted like a value
    LOST = 4  # a tombstone with references to it: deleted, or its creation will never come


class UserState(IntEnum):
    CREATING = 0  # remote() was called and the owner has not confirmed
    FORKING = 1  # received from another user; the owner has not confirmed
    CONFIRMED = 2  # holds at least one token
    FAILED = 3  # creation failed or timed out
    LOST = 4  # the owner died


class UnusableRRefError(RuntimeError):
    """`share` of a reference that is FAILED or LOST here, or that this worker does not hold."""

    def __init__(self, rref: RRefId, why: str, lost: bool) -> None:
        super().__init__(f"RRef {rref.created_on}:{rref.local_id} cannot be used: {why}")
        self.rref = rref
        self.why = why
        self.lost = lost


class RRefProtocolError(RuntimeError):
    """The glue called the machine against its contract (an id used twice, a value set twice)."""

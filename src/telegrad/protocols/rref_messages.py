"""Data of the RRef protocol: ids, tickets, messages, effects, states.

A `Ticket` travels in the metadata of a call, so that the receiver can process it without unpickling. The types of
`Message` are messages of their own. An `Effect` is what the table asks its caller to do. All are named tuples: cheap to
create, and a codec writes them field by field. Two types with equal fields compare equal as tuples, so distinguish them
by type.
"""

from enum import IntEnum
from typing import NamedTuple


class RRefId(NamedTuple):
    """Unique id of one remote reference in the group.

    The creator chooses `local_id`. It must not reuse one, nor one of an earlier incarnation of the same worker id. For
    example, each incarnation starts at `incarnation << 32`.
    """

    created_on: int  # worker id of the creator, which need not be the owner
    local_id: int


class TicketKind(IntEnum):
    """Roles of sender and receiver of a reference. They decide how it is counted."""

    GRANT = 0  # owner -> user: the owner has counted a token for the receiver already
    RETURN = 1  # user -> owner: the sender keeps its token until the owner accepts
    FORK = 2  # user -> another user: the sender keeps its token until the receiver has one of its own
    SELF = 3  # worker -> itself: the present entry is kept until the ticket is received


class Ticket(NamedTuple):
    """A reference inside a message.

    Each ticket is received, discarded or unshared exactly once.
    """

    rref: RRefId
    owner: int
    kind: TicketKind
    transfer: int  # RETURN, FORK, SELF: names the pin at the sender, or 0. GRANT: private to the sender


# ---- messages between machines ------------------------------------------------------------------------------------


class Add(NamedTuple):
    """User -> owner: count one token for the sender. The owner always replies `Added`."""

    rref: RRefId


class Added(NamedTuple):
    """Owner -> user: one token is counted for the receiver.

    The value may have failed nevertheless; a request for the value reports that.
    """

    rref: RRefId


class Accept(NamedTuple):
    """Receiver of RETURN and FORK tickets -> sender: these pins may be dropped."""

    transfers: tuple[int, ...]


class Release(NamedTuple):
    """User -> owner: subtract the given number of tokens from the sender's count."""

    items: tuple[tuple[RRefId, int], ...]


class Expect(NamedTuple):
    """Owner -> creator: a reference is in use, but its creation has not arrived.

    The creator does not reply while the creation is in progress. Otherwise, or once it has failed, it sends `Abandon`.
    """

    rref: RRefId


class Abandon(NamedTuple):
    """Creator -> owner: the reference is not being created and will not be.

    `lost`: it was created, or its creation was sent, in a session that has ended.
    """

    rref: RRefId
    why: str
    lost: bool = False


Message = Add | Added | Accept | Release | Expect | Abandon

# ---- effects: what the caller must do, in this order --------------------------------------------------------------


class Send(NamedTuple):
    to: int
    message: Message


class Delete(NamedTuple):
    """The owner's entry has ended.

    Free the value, if any, and fail the requests that still wait for it.
    """

    rref: RRefId


class Confirmed(NamedTuple):
    """The user entry, which was CREATING or FORKING, now holds a token of its own."""

    rref: RRefId


class Failed(NamedTuple):
    """The local entry is permanently unusable.

    Its state is FAILED at a user, LOST at a user or at the owner.
    """

    rref: RRefId
    why: str
    lost: bool  # a worker's death is the cause (owner, creator, or a link in the chain of forks)


Effect = Send | Delete | Confirmed | Failed

# ---- states -------------------------------------------------------------------------------------------------------


class OwnerState(IntEnum):
    EXPECTED = 0  # placeholder: a reference arrived before the creation
    CREATING = 1  # the function runs; the entry cannot end
    READY = 2  # holds a value
    FAILED = 3  # holds an exception, shared and counted like a value
    LOST = 4  # tombstone with references to it: deleted, or the creation will never arrive


class UserState(IntEnum):
    CREATING = 0  # remote() was called and the owner has not confirmed
    FORKING = 1  # received from another user; the owner has not confirmed
    CONFIRMED = 2  # holds at least one token
    FAILED = 3  # creation failed or timed out
    LOST = 4  # the owner died


class UnusableRRefError(RuntimeError):
    """The reference is FAILED or LOST at this worker, or this worker does not hold it."""

    def __init__(self, rref: RRefId, why: str, lost: bool) -> None:
        super().__init__(f"RRef {rref.created_on}:{rref.local_id} cannot be used: {why}")
        self.rref = rref
        self.why = why
        self.lost = lost


class RRefProtocolError(RuntimeError):
    """The caller violated the table's contract: an id used twice, a value set twice."""

"""Membership of a group: the rules of its log of epochs.

The members of a group are the result of a log that all workers read in the same order. Each entry has a number, its
epoch, and is a `Join`, a `Leave` or a `Lose`. A `GroupView` applies entries, so two workers at the same epoch have the
same members.

An id belongs to one name for the life of the group: no other name gets it, also after its worker has left. An
incarnation distinguishes the processes that use a name one after the other. Later processes have higher incarnations
(`incarnation_of`). A newer incarnation replaces an older one, and an entry about an older one has no effect.

An entry that breaks a rule has no effect either. `GroupView.check` reports the rule before the entry is written. It
cannot report whether the previous incarnation of a name is alive: the lease of its id decides this
(`telegrad.protocols.leases`).
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = [
    "MAX_ID",
    "Change",
    "Event",
    "GroupView",
    "Join",
    "Joined",
    "Leave",
    "Left",
    "Lose",
    "Lost",
    "Member",
    "MembershipError",
    "incarnation_of",
    "ordinal_of",
]

MAX_ID = 32767
_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")
_RANDOM_BITS = 32  # of an incarnation: they distinguish groups with equal counters


def incarnation_of(ordinal: int, random: int) -> int:
    """Return an incarnation.

    Args:
        ordinal: Number of processes that have used the name, including this one.
        random: Random number of 32 bits.
    """
    return ordinal << _RANDOM_BITS | random


def ordinal_of(incarnation: int) -> int:
    """Return the number of the process among those with its name, from 1."""
    return incarnation >> _RANDOM_BITS


class Member(NamedTuple):
    """Incarnation of a worker that is in the group."""

    name: str
    id: int
    incarnation: int
    record: Any = None  # data that it publishes, such as its addresses; the rules do not read it


class Join(NamedTuple):
    """Entry: a worker joins, or comes back as a new process."""

    member: Member
    world_size: int | None = None  # None: as a member of a dynamic group


class Leave(NamedTuple):
    """Entry: a worker leaves after its shutdown."""

    id: int
    incarnation: int


class Lose(NamedTuple):
    """Entry: a worker died."""

    id: int
    incarnation: int
    why: str


class Joined(NamedTuple):
    member: Member


class Left(NamedTuple):
    member: Member


class Lost(NamedTuple):
    member: Member
    why: str


Change = Join | Leave | Lose
Event = Joined | Left | Lost


class MembershipError(RuntimeError):
    """A worker cannot be a member of this group; the text gives the conflict."""


class GroupView:
    """Members of a group at one epoch of its log.

    Args:
        world_size: Number of members of a static group; None for a dynamic group.
    """

    def __init__(self, world_size: int | None = None) -> None:
        self.world_size: int | None = world_size or None
        self.epoch: int = 0
        self.members: dict[int, Member] = {}
        self.owners: dict[int, str] = {}  # id -> name; an id is never used for another name
        self.latest: dict[str, int] = {}  # name -> its newest incarnation, also after its end
        self._ids: dict[str, int] = {}  # name -> its last id, also after its end

    def restore(self, epoch: int, members: Iterable[Member], owners: dict[int, str], latest: dict[str, int]) -> None:
        """Take the state of a checkpoint.

        Args:
            epoch: Its epoch.
            members: The members at that time.
            owners: Names by id.
            latest: Newest incarnations by name.
        """
        self.epoch, self.owners, self.latest = epoch, owners, latest
        self.members = {member.id: member for member in members}
        self._ids = {member.name: member.id for member in self.members.values()}

    def by_name(self, name: str) -> Member | None:
        """Return the member with a name, or None."""
        member = self.members.get(self._ids.get(name, -1))
        return member if member is not None and member.name == name else None

    def has(self, number: int, incarnation: int) -> bool:
        """Return whether this incarnation of a worker is in the group."""
        member = self.members.get(number)
        return member is not None and member.incarnation == incarnation

    def is_superseded(self, member: Member) -> bool:
        """Return whether a newer process has taken the name of a member."""
        return self.latest.get(member.name, -1) > member.incarnation

    def apply(self, change: Change) -> list[Event]:
        """Apply the entry of the next epoch.

        Returns:
            The effects, in order; none if the entry breaks a rule or is about an earlier incarnation.
        """
        self.epoch += 1
        if isinstance(change, Join):
            return self._join(change)
        member = self.members.get(change.id)
        if member is None or member.incarnation != change.incarnation:
            return []
        del self.members[change.id]
        return [Left(member)] if isinstance(change, Leave) else [Lost(member, change.why)]

    def skip(self) -> None:
        """Count an epoch with an entry that cannot be trusted; it has no effect."""
        self.epoch += 1

    def _join(self, join: Join) -> list[Event]:
        member = join.member
        if member.incarnation <= self.latest.get(member.name, -1):
            return []
        try:
            self.check(join)
        except MembershipError:
            return []
        return self._add(member)

    def _add(self, member: Member) -> list[Event]:
        events: list[Event] = []
        before = self.by_name(member.name)
        if before is not None:
            del self.members[before.id]
            events.append(Lost(before, f"a new process has taken the name {member.name}"))
        self.members[member.id] = member
        self._ids[member.name] = member.id
        self.owners[member.id] = member.name
        self.latest[member.name] = member.incarnation
        events.append(Joined(member))
        return events

    def check(self, join: Join) -> None:
        """Check whether a worker may join if its previous incarnation has ended.

        Raises:
            MembershipError: A rule forbids it.
        """
        (name, number, _, _), size = join
        if not _NAME.fullmatch(name):
            raise MembershipError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, "
                f"but got {name}"
            )
        if not 0 <= number <= MAX_ID:
            raise MembershipError(f"Worker {name} has rank {number}, which is not between 0 and {MAX_ID}.")
        if (size is None) != (self.world_size is None):
            raise MembershipError(
                "RPC group mixes statically and dynamically initialized members which is not supported."
            )
        if size != self.world_size:
            raise MembershipError(
                f"Worker {name} was started with world size {size}, its group with {self.world_size}."
            )
        if self.world_size is not None and number >= self.world_size:
            raise MembershipError(f"Worker {name} has rank {number}, but world size is {self.world_size}.")
        owner = self.owners.get(number, name)
        if owner != name:
            if number in self.members:
                raise MembershipError(f"Rank {number} is taken twice: by workers {owner} and {name}.")
            raise MembershipError(
                f"Rank {number} belonged to worker {owner}, and no other name gets it, so worker {name} cannot have it."
                " Choose another rank, or none."
            )

    def found(self, members: list[Member]) -> None:
        """Begin a static group with the members of its rendezvous, at epoch 0.

        Raises:
            MembershipError: They do not form a group: two have the same name or rank, or one is invalid.
        """
        for member in members:
            namesake = self.by_name(member.name)
            if namesake is not None and namesake.id != member.id:
                first, second = sorted((namesake.id, member.id))
                raise MembershipError(
                    f"RPC worker name {member.name} is not unique. Workers {first} and {second} share the same name."
                )
            self.check(Join(member, self.world_size))
            self._add(member)

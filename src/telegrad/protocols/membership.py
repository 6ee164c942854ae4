"""Membership of the group: join, leave, loss and return of workers.

Each worker has one pure `GroupView`. A member is a name, an id and an incarnation, which counts the processes that have
used this id. A group is static or dynamic. In a static group every member states the same world size, has an id below
it, and none joins late. In a dynamic group members join and leave. A record that does not fit raises `MembershipError`
and leaves the view unchanged.

A worker that died may return under its name and id with a higher incarnation, in a static group too. It may return
before its loss was detected: then the old incarnation is `Lost` and the new one `Joined`, in this order. The machine
cannot distinguish this from a second worker started by mistake. The caller can, by checking whether the first worker
still replies.
"""

import re
from typing import NamedTuple

MAX_ID = 32767
_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")


class Member(NamedTuple):
    name: str
    id: int
    incarnation: int = 0
    world_size: int | None = None  # None: joined as a member of a dynamic group
    process: str = ""  # unique per process


class Joined(NamedTuple):
    member: Member


class Left(NamedTuple):
    """The member left after its shutdown and sends no more messages."""

    member: Member


class Lost(NamedTuple):
    member: Member
    why: str


Event = Joined | Left | Lost


class MembershipError(RuntimeError):
    """A worker cannot be a member of this group; the text gives the conflict."""


class GroupView:
    """The members of the group as one worker knows them.

    Changes are returned as events.

    Args:
        world_size: Number of members of a static group; None for a dynamic group.
    """

    def __init__(self, world_size: int | None = None) -> None:
        self.world_size: int | None = world_size or None
        self.members: dict[int, Member] = {}
        self._ids: dict[str, int] = {}
        self._gone: dict[int, int] = {}  # id -> the latest incarnation that left or died

    def by_name(self, name: str) -> Member | None:
        number = self._ids.get(name)
        return None if number is None else self.members[number]

    @property
    def complete(self) -> bool:
        """Whether a static group has all its members. A dynamic group is always complete."""
        return self.world_size is None or len(self.members) == self.world_size

    def missing(self) -> list[int]:
        """Return the unused ids of a static group."""
        return [number for number in range(self.world_size or 0) if number not in self.members]

    def join(self, member: Member, replaces: bool = False) -> list[Event]:
        """Add a member that announces itself.

        Repeated announcements, and those of incarnations that have left or died, change nothing.

        Args:
            member: The new member.
            replaces: The incarnation that has this id now is known not to reply any more.

        Raises:
            MembershipError: The member does not fit into the group.
        """
        known = self.members.get(member.id)
        if known == member or member.incarnation <= self._gone.get(member.id, -1):
            return []
        if known is not None and known.name == member.name and known.incarnation > member.incarnation:
            return []
        self._check(member, known, replaces)
        events: list[Event] = []
        if known is not None:
            events = self.lost(member.id, known.incarnation, f"worker {known.name} came back as a new process")
        self.members[member.id] = member
        self._ids[member.name] = member.id
        events.append(Joined(member))
        return events

    def leave(self, number: int, incarnation: int) -> list[Event]:
        """Remove a member that has left after its shutdown."""
        member = self._remove(number, incarnation)
        return [] if member is None else [Left(member)]

    def lost(self, number: int, incarnation: int, why: str) -> list[Event]:
        """Remove a member that died.

        No effect if it has left already or a later incarnation has its id.
        """
        member = self._remove(number, incarnation)
        return [] if member is None else [Lost(member, why)]

    def free_id(self) -> int:
        """Return the lowest unused id, for a member that did not choose one.

        Raises:
            MembershipError: All ids are in use.
        """
        for number in range(MAX_ID + 1):
            if number not in self.members:
                return number
        raise MembershipError(f"RPC group is full: it has {MAX_ID + 1} workers.")

    def _remove(self, number: int, incarnation: int) -> Member | None:
        self._gone[number] = max(incarnation, self._gone.get(number, -1))
        member = self.members.get(number)
        if member is None or member.incarnation > incarnation:
            return None
        del self.members[number]
        del self._ids[member.name]
        return member

    def _check(self, member: Member, known: Member | None, replaces: bool) -> None:
        name, number, size = member.name, member.id, member.world_size
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
        namesake = self._ids.get(name, number)
        if namesake != number:
            raise MembershipError(
                f"RPC worker name {name} is not unique. Workers {min(namesake, number)} and {max(namesake, number)} "
                "share the same name."
            )
        if known is None or (known.name == name and replaces and known.incarnation < member.incarnation):
            return
        if known.name == name:
            raise MembershipError(f"Rank {number} is taken: worker {name} is in the group already.")
        raise MembershipError(f"Rank {number} is taken twice: by workers {known.name} and {name}.")

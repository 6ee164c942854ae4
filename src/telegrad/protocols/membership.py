"""Who is in the group: joining, leaving, dying and coming back, as one pure `GroupView` per worker.

A member is a name, an id and an incarnation, which counts how often this id was taken. A group is static (every member
states the same world size, ids 0 to size - 1, nobody joins late) or dynamic (members come and go). A record that does
not fit is refused with `MembershipError`, and the view stays as it was.

A worker that died may come back under its name and id with a higher incarnation, in a static group too. It may even be
back before its death was noticed: the old incarnation is then `Lost` and the new one `Joined`, in this order. Only the
glue can tell that from a second worker started by mistake, by trying whether the first one still answers.
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
    process: str = ""  # anything that no two processes share


class Joined(NamedTuple):
    member: Member


class Left(NamedTuple):
    """In good order: nothing of it is still to come."""

    member: Member


class Lost(NamedTuple):
    member: Member
    why: str


Event = Joined | Left | Lost


class MembershipError(RuntimeError):
    """A worker cannot be a member of this group; the text says why, and what stands against it."""


class GroupView:
    """The members that one worker knows of. `world_size` None: a dynamic group. Changes are returned as events."""

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
        """A static group has all its members; a dynamic one is never short of any."""
        return self.world_size is None or len(self.members) == self.world_size

    def missing(self) -> list[int]:
        """The ids of a static group that are not taken."""
        return [number for number in range(self.world_size or 0) if number not in self.members]

    def join(self, member: Member, replaces: bool = False) -> list[Event]:
        """A member announces itself. Repeated announcements, and those of incarnations that are gone, change nothing.

        replaces: the incarnation that has its place now is known not to answer any more.
        Raises MembershipError.
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
        """A member said goodbye."""
        member = self._remove(number, incarnation)
        return [] if member is None else [Left(member)]

    def lost(self, number: int, incarnation: int, why: str) -> list[Event]:
        """A member died. Nothing happens if it is gone already, or if a later incarnation took its place."""
        member = self._remove(number, incarnation)
        return [] if member is None else [Lost(member, why)]

    def free_id(self) -> int:
        """The lowest id nobody has, for a member of a dynamic group that has no say in it. Raises MembershipError."""
        for number in range(MAX_ID + 1):
            if number not in self.members:
                return number
        raise MembershipError(f"RPC group is full: it has {MAX_ID + 1} workers.")

    def next_incarnation(self, number: int) -> int:
        """What the next worker with this id should call itself."""
        known = self.members.get(number)
        return max(self._gone.get(number, -1), -1 if known is None else known.incarnation) + 1

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

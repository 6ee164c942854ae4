"""Reservation of an id and an incarnation in a group, before a worker joins it."""

import secrets
from typing import NamedTuple

from telegrad.group.lease import Lease, Taken
from telegrad.group.log import GroupLog
from telegrad.options import Options
from telegrad.protocols.leases import Timing
from telegrad.protocols.membership import MAX_ID, Join, MembershipError, incarnation_of
from telegrad.protocols.membership import Member as Seat
from telegrad.types import WorkerInfo
from telegrad.waits import Wait

__all__ = ["Reservation", "require_end", "reserve"]


class Reservation(NamedTuple):
    """Id and incarnation of a worker that has not joined yet.

    Its lease keeps others from taking them.
    """

    info: WorkerInfo
    incarnation: int
    lease: Lease
    timing: Timing


def reserve(log: GroupLog, name: str, rank: int, options: Options, wait: Wait) -> Reservation:
    """Reserve an id and an incarnation in a group. The group does not change.

    Args:
        log: Log of the group, which has been loaded.
        name: Name of the new worker.
        rank: Id of the new worker; negative for the previous id of the name, or a new one.
        options: Options of the worker.
        wait: Wait for the lease of an earlier process of this name to expire.

    Raises:
        RuntimeError: A live worker has the name or the rank, or the rank belongs to another name.
    """
    timing = Timing(options.member_lease)
    ordinal = log.store.add(f"incarnations/{name}", 1)
    incarnation = incarnation_of(ordinal, secrets.randbits(32))
    namesake = log.view.by_name(name)
    number = rank if rank >= 0 else namesake.id if namesake is not None else _id_of(log, name)
    log.view.check(Join(Seat(name, number, incarnation), log.view.world_size))
    if namesake is not None and namesake.id != number:
        require_end(log, namesake, number, timing, wait)
    owner = log.store.compare_set(f"rank/{number}", None, name)
    assert owner is not None
    lease = _lease(log, number, incarnation, timing)
    try:
        lease.acquire(wait, lambda: f"worker {owner} (rank {number})")
    except Taken:
        does = "is in the group already" if owner == name else "joins it"
        raise MembershipError(
            f"rank {number} is taken by worker {owner}, which {does}: its process is alive. Give each worker a name and"
            " a rank of its own."
        ) from None
    if owner != name:  # it has reserved the rank, never joined, and has ended
        owner = log.store.compare_set(f"rank/{number}", owner, name)
        if owner != name:
            lease.release()
            raise MembershipError(
                f"rank {number} is taken by worker {owner}, so worker {name} cannot have it. Give each worker a rank of"
                " its own."
            )
    if log.view.world_size is None:
        log.store.set(f"id/{name}", str(number))
    return Reservation(WorkerInfo(name, number), incarnation, lease, timing)


def _lease(log: GroupLog, number: int, incarnation: int, timing: Timing) -> Lease:
    assert log.group is not None
    return Lease(log.store, log.group, number, incarnation, timing)


def require_end(log: GroupLog, namesake: Seat, number: int, timing: Timing, wait: Wait) -> None:
    """Take the lease of a namesake with another id, to establish that it has ended.

    Args:
        log: Log of the group.
        namesake: Member of the same name.
        number: Id of the new worker.
        timing: Times of the leases of the group.
        wait: Wait for the lease to expire.

    Raises:
        MembershipError: The namesake is alive.
    """
    try:
        _lease(log, namesake.id, 0, timing).acquire(wait, lambda: f"worker {namesake.name}")
    except Taken:
        first, second = sorted((namesake.id, number))
        raise MembershipError(
            f"RPC worker name {namesake.name} is not unique. Workers {first} and {second} share the same name."
        ) from None


def _id_of(log: GroupLog, name: str) -> int:
    """Return the id of a name, or one that no name has had."""
    known = log.store.get(f"id/{name}")
    if known is not None and log.store.get(f"rank/{known}") == name:
        return int(known)
    while True:
        number = log.store.add("ids", 1) - 1
        if number > MAX_ID:
            raise MembershipError(
                f"RPC group is full: {MAX_ID + 1} names have been in it. Use the old names of workers that left."
            )
        if log.store.compare_set(f"rank/{number}", None, name) == name:
            return number

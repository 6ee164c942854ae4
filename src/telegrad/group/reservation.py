"""Reservation of an id and an incarnation in a group, before a worker joins it."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from telegrad.group.holder import Dial, Holder
from telegrad.group.lease import Lease, NotExpired, Taken
from telegrad.group.log import GroupLog
from telegrad.group.records import Member
from telegrad.options import Options
from telegrad.protocols.leases import Timing
from telegrad.protocols.membership import MAX_ID, Event, Join, MembershipError, incarnation_of
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


def reserve(
    log: GroupLog,
    name: str,
    rank: int,
    options: Options,
    wait: Wait,
    dial: Callable[[Member], Dial] | None = None,
) -> Reservation:
    """Reserve an id and an incarnation in a group. The group does not change.

    Args:
        log: Log of the group, which has been loaded.
        name: Name of the new worker.
        rank: Id of the new worker; negative for the previous id of the name, or a new one.
        options: Options of the worker.
        wait: Wait for the lease of an earlier process of this name to expire.
        dial: Begins to dial a member; None if the group has no member yet.

    Raises:
        RuntimeError: A live worker has the name or the rank, or the rank belongs to another name.
    """
    timing = Timing(options.member_lease)
    ordinal = log.store.add(f"incarnations/{name}", 1)
    newcomer = _Newcomer(log, name, incarnation_of(ordinal, secrets.randbits(32)), timing, wait, dial)
    namesake = log.view.by_name(name)
    known = rank if rank >= 0 else namesake.id if namesake is not None else _last_id(log, name)
    if known is not None:
        log.view.check(Join(Seat(name, known, newcomer.incarnation), log.view.world_size))
        if namesake is not None and namesake.id != known:
            assert dial is not None
            require_end(log, namesake, known, timing, wait, dial)
        return newcomer.take(known)
    while True:
        number = log.store.add("ids", 1) - 1
        if number > MAX_ID:
            raise MembershipError(
                f"RPC group is full: {MAX_ID + 1} names have been in it. Use the old names of workers that left."
            )
        if log.view.owners.get(number, name) == name:
            log.view.check(Join(Seat(name, number, newcomer.incarnation), log.view.world_size))
            with suppress(_IdTaken):  # by a newcomer that has asked for it
                return newcomer.take(number)


class _IdTaken(MembershipError):
    """A live worker has the id."""


class _Newcomer(NamedTuple):
    """Worker that takes an id."""

    log: GroupLog
    name: str
    incarnation: int
    timing: Timing
    wait: Wait
    dial: Callable[[Member], Dial] | None

    def take(self, number: int) -> Reservation:
        """Take the lease of an id, and then the id.

        Only the holder of the lease changes the owner of the id.

        Raises:
            _IdTaken: A live worker has it.
        """
        log, name, key = self.log, self.name, f"rank/{number}"
        seat = log.view.members.get(number)
        least = 0 if seat is None else seat.incarnation
        ended = 0 if log.view.by_name(name) is not None else log.view.latest.get(name, 0)
        lease = _lease(log, number, name, self.incarnation, self.timing, least, ended)
        holder = None if seat is None or self.dial is None else Holder(log, name, self.timing, self.dial)
        try:
            lease.acquire(self.wait, lambda: f"worker {log.store.get(key) or name} (rank {number})", holder)
            owner = None
            while (owner := log.store.compare_set(key, owner, name)) != name:
                pass  # it never joined, and has ended
            if log.view.world_size is None:
                log.store.set(f"id/{name}", str(number))
        except Taken as e:
            owner = log.store.get(key) or name
            does = "is in the group already" if owner == name else "joins it"
            why = _why_taken(e, holder, self.timing, self.wait)
            raise _IdTaken(f"rank {number} is taken by worker {owner}, which {does}: {why}.") from None
        except BaseException:
            with suppress(RuntimeError):  # the store may have ended
                lease.release()
            raise
        finally:
            if holder is not None:
                holder.close()
        return Reservation(WorkerInfo(name, number), self.incarnation, lease, self.timing)


def _why_taken(error: Taken, holder: Holder | None, timing: Timing, wait: Wait) -> str:
    if not isinstance(error, NotExpired):
        return "its process is alive. Give each worker a name and a rank of its own"
    if holder is not None and holder.outvoted:
        return _awaited_loss(holder, wait)
    return (
        f"its process has ended at most {timing.lifetime:g} s (member_lease) ago, or is alive, and the wait ended after"
        f" {wait.timeout:g} s (rpc_timeout). Join again later, or wait for longer"
    )


def _awaited_loss(holder: Holder, wait: Wait) -> str:
    return (
        f"its process does not answer this worker, but the group, with {holder.outvoted}, has not lost it, and the wait"
        f" for that ended after {wait.timeout:g} s (rpc_timeout). Check the network between both, or join again later"
    )


def _lease(
    log: GroupLog, number: int, name: str, incarnation: int, timing: Timing, least: int, ended: int = 0
) -> Lease:
    assert log.group is not None
    return Lease(log.store, log.group, number, name, incarnation, timing, least, ended)


def require_end(
    log: GroupLog,
    namesake: Seat,
    number: int,
    timing: Timing,
    wait: Wait,
    dial: Callable[[Member], Dial],
    on_events: Callable[[Sequence[Event]], object] = lambda _: None,
) -> None:
    """Take the lease of a namesake with another id, to establish that it has ended.

    Args:
        log: Log of the group.
        namesake: Member of the same name.
        number: Id of the new worker.
        timing: Times of the leases of the group.
        wait: Wait for the lease to expire.
        dial: Begins to dial a member.
        on_events: Called with the effects of entries of the log that are read meanwhile.

    Raises:
        MembershipError: The namesake is alive.
    """
    lease = _lease(log, namesake.id, namesake.name, 0, timing, namesake.incarnation)
    holder = Holder(log, namesake.name, timing, dial, on_events)
    try:
        lease.acquire(wait, lambda: f"worker {namesake.name}", holder)
    except Taken:
        first, second = sorted((namesake.id, number))
        why = f" Of worker {namesake.id}: {_awaited_loss(holder, wait)}." if holder.outvoted else ""
        raise MembershipError(
            f"RPC worker name {namesake.name} is not unique. Workers {first} and {second} share the same name.{why}"
        ) from None
    finally:
        holder.close()
    lease.release()


def _last_id(log: GroupLog, name: str) -> int | None:
    """Return the last id of a name, unless another name has it since."""
    known = log.store.get(f"id/{name}")
    return int(known) if known is not None and log.store.get(f"rank/{known}") == name else None

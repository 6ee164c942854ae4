"""Lease of one worker in the store of its group.

The lease of an id has a holder, which is one incarnation. A newcomer takes the lease of its id over from a holder that
has ended. A worker that finds a newer incarnation in its lease has been replaced.

The value has a MAC if the group was given a secret. A value of another program does not count as a renewal; the holder
writes its own value again.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.errors import TelegradError
from telegrad.group.group_store import GroupStore
from telegrad.group.process_identity import GONE, RUNNING, fate_of, own_process
from telegrad.group.records import Group, sealed, unsealed
from telegrad.protocols.leases import (
    NOT_RENEWED,
    Timing,
    Watch,
    holder_of,
    lease_value,
    name_of,
    process_of,
    released_value,
)
from telegrad.waits import Wait

__all__ = ["Lease", "NotExpired", "Taken", "lease_key", "read_lease", "sealed_lease", "value_of"]

logger: logging.Logger = logging.getLogger("telegrad")

_POLL = 0.1  # s between two checks of a lease that another process holds
_MAX_WRITES = 3  # until a renewal gives up: another program writes to the lease all the time


class Taken(TelegradError):
    """A live process has the lease."""


class NotExpired(Taken):
    """The wait ended before the lease: its process may have ended."""


def lease_key(worker_id: int) -> str:
    """Return the key of the lease of an id."""
    return f"lease/{worker_id}"


def sealed_lease(worker_id: int, value: str, group: Group) -> str:
    """Return the value of a lease as text for the store."""
    key = lease_key(worker_id)
    return sealed(key, [key, value], group)


def read_lease(store: GroupStore, worker_id: int, group: Group | None, incarnation: int | None = None) -> str | None:
    """Read a lease.

    Args:
        store: Store of the group.
        worker_id: Id of the member.
        group: Token and secret of the group; None to read the value without checking its origin.
        incarnation: Incarnation of the member; None for any.

    Returns:
        The value; None if there is none; `NOT_RENEWED` if this incarnation has not written it.
    """
    return value_of(store.get(lease_key(worker_id)), worker_id, incarnation, group)


def value_of(text: str | None, worker_id: int, incarnation: int | None, group: Group | None) -> str | None:
    """Return the value of a lease that was read from the store; see `read_lease`."""
    if text is None:
        return None
    try:
        value = unsealed(lease_key(worker_id), text, group, lambda _, value: str(value))
    except TelegradError:
        return NOT_RENEWED
    return value if incarnation in (None, holder_of(value)) else NOT_RENEWED


class MemberOfName(Protocol):
    """Member that has the lease, as `telegrad.group.holder` observes it."""

    is_alive: bool
    outvoted: str

    def has_ended(self, watch: Watch) -> bool: ...


def _reason_to_wait(holder: MemberOfName | None) -> str:
    if holder is None or not holder.outvoted:
        return "its lease has not expired"
    return f"its lease has expired, but the group, with {holder.outvoted}, has not lost it"


class Lease:
    """Lease of this worker.

    Args:
        store: Store of the group.
        group: Token and secret of the group.
        worker_id: Id of the worker.
        name: Name of the worker.
        incarnation: Incarnation of the worker.
        timing: Times of the leases of the group.
        least: Incarnation of the member with this id: values of earlier ones do not count.
        ended: Last incarnation of this name that has ended according to the log, although its process may go on.
    """

    def __init__(
        self,
        store: GroupStore,
        group: Group,
        worker_id: int,
        name: str,
        incarnation: int,
        timing: Timing,
        least: int = 0,
        ended: int = 0,
    ) -> None:
        self._store = store
        self._group = group
        self._id = worker_id
        self._key = lease_key(worker_id)
        self._name = name
        self._incarnation = incarnation
        self._least = least
        self._ended = ended
        self._timing = timing
        self._process = own_process()
        self._count = 0
        self._held: str | None = None

    def acquire(self, wait: Wait, describe: Callable[[], str], holder: MemberOfName | None = None) -> None:
        """Take the lease, once its holder has ended.

        Args:
            wait: Limit and log lines of the wait for a holder that renews the lease no more.
            describe: Returns the name of the worker that has the lease.
            holder: Member that may have the lease; None if the lease alone decides.

        Raises:
            Taken: The holder is alive.
            NotExpired: The wait has ended before that was known.
        """
        found = self._store.get(self._key)
        watch = Watch(self._timing, time.monotonic(), self._read(found))
        while True:
            if self._holder_has_ended(watch, holder):
                self._held = mine = self._sealed(self._value())  # the reply may be lost
                found = self._store.compare_set(self._key, found, mine, self._timing.lifetime)
                if found == mine:
                    return
                self._held = None
            if watch.renewals or self._holder_runs(watch) or (holder is not None and holder.is_alive):
                raise Taken(f"{describe()} is alive")
            if not wait.left:
                raise NotExpired(f"the lease of {describe()} has not expired")
            wait.step(lambda: (f"the end of {describe()}", _reason_to_wait(holder)))
            time.sleep(_POLL)
            found = self._store.get(self._key)
            watch.observe(time.monotonic(), self._read(found))

    def _value(self) -> str:
        return lease_value(self._incarnation, self._process, self._count, self._timing.lifetime, self._name)

    def _sealed(self, value: str) -> str:
        return sealed_lease(self._id, value, self._group)

    def _read(self, found: str | None) -> str | None:
        value = value_of(found, self._id, None, self._group)
        return NOT_RENEWED if value is not None and holder_of(value) < self._least else value

    def _holder_runs(self, watch: Watch) -> bool:
        """Return whether the kernel says so.

        A lease of this process may be left over from a join that failed.
        """
        process = process_of(watch.value)
        return process != self._process and fate_of(process) == RUNNING

    def _holder_has_ended(self, watch: Watch, holder: MemberOfName | None) -> bool:
        if name_of(watch.value) == self._name and holder_of(watch.value) <= self._ended:
            return True
        if fate_of(process_of(watch.value)) == GONE:
            return True
        return watch.has_expired(time.monotonic()) if holder is None else holder.has_ended(watch)

    def renew(self) -> bool:
        """Renew the lease.

        Returns:
            False if a newer process of this name has it.

        Raises:
            TelegradError: Another program writes to the lease all the time.
        """
        self._count += 1
        return self._write(self._value())

    def release(self) -> None:
        """Give the lease up: the worker has left."""
        if self._held is not None:
            self._write(released_value(self._incarnation, self._name))

    def _write(self, value: str) -> bool:
        """Replace the value of this worker, or one that is not of a newer process.

        The store may have executed a write without a reply, or have deleted the value of a worker that was late.
        """
        mine, expected = self._sealed(value), self._held
        for _ in range(_MAX_WRITES):
            found = self._store.compare_set(self._key, expected, mine, self._timing.lifetime)
            if found == mine:
                self._held = mine
                return True
            if self._is_replaced(self._read(found)):
                return False
            expected = found
        raise TelegradError(f"another program writes to the key {self._key} of the group's store all the time")

    def _is_replaced(self, found: str | None) -> bool:
        """Return whether a later holder has taken the lease.

        Incarnations of different names have no order.
        """
        if found is None or found == NOT_RENEWED:
            return False
        return name_of(found) != self._name or holder_of(found) > self._incarnation

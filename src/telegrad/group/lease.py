"""Lease of one worker in the store of its group.

The lease of an id has a holder, which is one incarnation. A newcomer takes the lease of its id over from a holder that
has ended. A worker that finds its lease with another holder has been replaced.
"""

import logging
import time
from collections.abc import Callable

from telegrad.errors import TelegradError
from telegrad.group.group_store import GroupStore
from telegrad.group.log import lease_key
from telegrad.group.process_identity import GONE, RUNNING, fate_of, own_process
from telegrad.protocols.leases import RELEASED, Timing, Watch, lease_value, process_of
from telegrad.waits import Wait

__all__ = ["Lease", "Taken"]

logger: logging.Logger = logging.getLogger("telegrad")

_POLL = 0.1  # s between two checks of a lease that another process holds


class Taken(TelegradError):
    """A live process has the lease."""


class Lease:
    """Lease of this worker.

    Args:
        store: Store of the group.
        worker_id: Id of the worker.
        incarnation: Incarnation of the worker.
        timing: Times of the leases of the group.
    """

    def __init__(self, store: GroupStore, worker_id: int, incarnation: int, timing: Timing) -> None:
        self._store = store
        self._key = lease_key(worker_id)
        self._incarnation = incarnation
        self._timing = timing
        self._process = own_process()
        self._count = 0
        self._held: str | None = None

    def acquire(self, wait: Wait, describe: Callable[[], str]) -> None:
        """Take the lease, once its holder has ended.

        Args:
            wait: Limit and log lines of the wait for a holder that renews the lease no more.
            describe: Returns the name of the worker that has the lease.

        Raises:
            Taken: The holder is alive.
        """
        found = self._store.get(self._key)
        watch = Watch(self._timing, time.monotonic(), found)
        while True:
            if self._holder_has_ended(watch):
                mine = self._value()
                found = self._store.compare_set(self._key, watch.value, mine, self._timing.lifetime)
                if found == mine:
                    self._held = mine
                    return
            if watch.renewals or fate_of(process_of(watch.value)) == RUNNING or not wait.left:
                raise Taken(f"{describe()} is alive")
            wait.step(lambda: (f"the end of {describe()}", "its lease has not expired"))
            time.sleep(_POLL)
            watch.observe(time.monotonic(), self._store.get(self._key))

    def _value(self) -> str:
        return lease_value(self._incarnation, self._process, self._count, self._timing.lifetime)

    def _holder_has_ended(self, watch: Watch) -> bool:
        return watch.has_expired(time.monotonic()) or fate_of(process_of(watch.value)) == GONE

    def renew(self) -> bool:
        """Renew the lease; return whether this worker still has it."""
        self._count += 1
        mine = self._value()
        found = self._store.compare_set(self._key, self._held, mine, self._timing.lifetime)
        if found is None:  # the store has deleted it: this worker was late
            found = self._store.compare_set(self._key, None, mine, self._timing.lifetime)
        if found != mine:
            return False
        self._held = mine
        return True

    def release(self) -> None:
        """Give the lease up: the worker has left."""
        if self._held is not None:
            self._store.compare_set(self._key, self._held, RELEASED, self._timing.lifetime)

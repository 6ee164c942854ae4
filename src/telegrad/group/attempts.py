"""Attempts of a torchrun run, kept apart in a store that outlives them.

When a worker fails, torchrun ends all workers and starts them again. The store belongs to its agent and still has the
keys of the previous attempt. The environment does not number the attempts: an agent counts only the restarts that its
own workers caused, not those of other agents, and not a change of members. So the worker with rank 0 announces each
attempt under a unique name, which begins with the run's id and its agent's count. All keys of a static group have this
name as prefix. The other ranks follow rank 0. They skip an attempt if its group is complete without them, and move on
when a later one is announced.

A group may have members that torchrun did not start. They meet rank 0 under the announced name. If torchrun did not
start rank 0, all members meet without an announced name.
"""

import os
import secrets
import time

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.store_parts import ATTEMPT, Part
from telegrad.group.store_waits import Store, place_of, wait_for_keys
from telegrad.waits import Wait

__all__ = ["Attempts", "Superseded"]

_RUN_CHECK, _OUTSIDE_CHECK = 0.5, 2.0  # s between two checks for a later attempt, in a run and outside of one
_MIN_PAUSE, _MAX_PAUSE = 0.005, 0.1  # s between two checks for another announcement


class Superseded(rendezvous.JoinRefused):
    """Another attempt was announced while this worker tried to join one."""


class Attempts:
    """Parts of the group's store in which a worker of a static group may meet it.

    The first part may be superseded: then the worker tries the next one.

    Args:
        store: the group's store.
        name, rank: of this worker.
        timeout: limit in seconds, from now on, for rank 0 to announce an attempt.
    """

    def __init__(self, store: Store, name: str, rank: int, timeout: float) -> None:
        self._store = store
        self._waiter = f"{name} (rank {rank})"
        self._rank = rank
        self._wait = Wait(self._waiter, timeout)
        self._run = os.environ.get("TORCHELASTIC_RUN_ID")
        # With a single agent, the counts are enough to distinguish attempts.
        alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
        self._count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if alone else ""
        self._key = ATTEMPT if self._run is None else f"{ATTEMPT}/{self._run}"
        self._tried: set[str] = set()
        self._current = ""
        self._failure: rendezvous.JoinRefused | None = None

    def part(self) -> Store:
        """Return the part of the store in which the latest attempt meets.

        Raises:
            TelegradError: rank 0 announced no attempt in time, or this worker belongs to an earlier one.
        """
        if self._rank == 0:
            self._current = "" if self._run is None else self._announce()
        elif self._run is not None or self._failure is not None:
            self._current = self._find()
        return Part(self._current, self._store) if self._current else self._store

    def wait(self, timeout: float) -> Wait:
        """Return the wait for the group of `part`; `Superseded` ends it."""
        return Wait(self._waiter, timeout, self.check, _RUN_CHECK if self._run is not None else _OUTSIDE_CHECK)

    def check(self) -> None:
        """Raise `Superseded` if an attempt later than that of `part` was announced."""
        if self._rank == 0 and self._run is None:
            return
        latest = self._latest()
        if latest and latest != self._current:
            raise Superseded(f"worker {self._waiter} belongs to an attempt of the run that a later one has replaced.")

    def another(self, failure: rendezvous.JoinRefused) -> bool:
        """Return whether `part` may find another attempt after a failed one."""
        if self._rank == 0 or (self._run is None and not isinstance(failure, Superseded)):
            return False
        self._tried.add(self._current)
        self._failure = failure
        return True

    def _latest(self) -> str:
        return bytes(self._store.get(self._key)).decode() if self._store.check([self._key]) else ""

    def _announce(self) -> str:
        """Announce a new attempt as rank 0 and return its name."""
        name = f"{self._run}/{self._count}-{secrets.token_hex(8)}"
        announced = ""
        while announced != name:  # again if another worker announced one between the read and the write
            latest = self._latest()
            before = self._count_of(latest)
            if self._count and before and int(before) > int(self._count):
                raise Superseded(
                    f"worker {self._waiter} belongs to attempt {self._count} of the run, but attempt {before} has"
                    " begun."
                )
            announced = bytes(self._store.compare_set(self._key, latest, name)).decode()
        self._store.set(ATTEMPT, name)  # for members outside of the run
        self._store.compare_set(ATTEMPT, name, self._latest())  # if another one has been announced meanwhile
        return name

    def _count_of(self, attempt: str) -> str:
        return attempt.rpartition("/")[2].partition("-")[0]

    def _find(self) -> str:
        """Return the attempt of this rank, or "" if rank 0 is outside of the run."""
        pause = _MIN_PAUSE
        while True:
            latest = self._latest()
            if latest and latest not in self._tried and not self._is_over(latest):
                return latest
            if not latest and rendezvous.has_rank_0(self._store):
                return ""
            if not self._wait.left:
                raise self._failure or TelegradError(
                    f"worker {self._waiter} waited {self._wait.timeout:g} s for the worker with rank 0 of the run"
                    f" {self._run} to begin. Has it been started?"
                )
            if latest:
                time.sleep(min(pause, self._wait.pause()))
                pause = min(2 * pause, _MAX_PAUSE)
            else:
                wait_for_keys(
                    self._store, [self._key], Wait(self._waiter, min(_RUN_CHECK, self._wait.pause())), self._awaited
                )
            self._wait.step(self._awaited)

    def _awaited(self) -> tuple[str, str]:
        place = place_of(self._store)
        return f"rank 0 of the run {self._run}{f' at {place}' if place else ''}", str(self._failure or "")

    def _is_over(self, attempt: str) -> bool:
        """Return whether an attempt is not this worker's.

        That is so if its group is complete, or if the only agent has another count.
        """
        count = self._count_of(attempt)
        if self._count and count and count != self._count:
            return True
        return rendezvous.has_list(Part(attempt, self._store))

"""Attempts of a run under torchrun, told apart in a store that outlives them.

When a worker fails, torchrun ends them all and starts them anew, with the store of its agent, in which the keys of the
attempt before still stand. The environment does not number the attempts: an agent counts the restarts that its own
workers have caused, neither those that other agents' have, nor a change of members. So the worker with rank 0 announces
each attempt under a name of its own, which begins with the run's id and its agent's count, and all keys of a static
group stand under that. The others go where rank 0 is: they take no announcement whose group is complete without them,
and move when a later one is made.

A group may have members that torchrun did not start. They meet rank 0 under the name that it has announced, or, if
torchrun did not start rank 0, all meet without one.
"""

import os
import secrets
import time
from typing import Any

from telegrad.errors import TelegradError
from telegrad.rpc.parts import ATTEMPT, Part
from telegrad.worker import rendezvous
from telegrad.worker.waits import Wait, place_of, wait_for_keys

__all__ = ["Attempts", "Superseded"]

_OFTEN, _SELDOM = 0.5, 2.0  # s between two looks for a later attempt, in a run and out of it
_SOONEST, _LATEST = 0.005, 0.1  # s between two looks for another announcement


class Superseded(rendezvous.Refused):
    """Rank 0 has announced another attempt than that which this worker tried to join."""


class Attempts:
    """Where a worker of a static group meets the others: in a part of the group's store, and then perhaps in another.

    Args:
        store: the group's.
        name, rank: of this worker.
        timeout: how long rank 0 may take to announce an attempt, in seconds, from now on.
    """

    def __init__(self, store: Any, name: str, rank: int, timeout: float) -> None:
        self._store = store
        self._who = f"{name} (rank {rank})"
        self._rank = rank
        self._wait = Wait(self._who, timeout)
        self._run = os.environ.get("TORCHELASTIC_RUN_ID")
        # The counts of a single agent do tell attempts apart.
        alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
        self._count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if alone else ""
        self._key = ATTEMPT if self._run is None else f"{ATTEMPT}/{self._run}"
        self._tried: set[str] = set()
        self._current = ""
        self._failure: rendezvous.Refused | None = None

    def part(self) -> Any:
        """The part of the store in which the latest attempt meets.

        Raises:
            TelegradError: rank 0 has announced none within the timeout, or this worker is of an earlier one.
        """
        if self._rank == 0:
            self._current = "" if self._run is None else self._announce()
        elif self._run is not None or self._failure is not None:
            self._current = self._find()
        return Part(self._current, self._store) if self._current else self._store

    def wait(self, timeout: float) -> Wait:
        """For the group of `part`; Superseded ends it."""
        return Wait(self._who, timeout, self.look, _OFTEN if self._run is not None else _SELDOM)

    def look(self) -> None:
        """Raises Superseded if a later attempt has been announced than that of `part`."""
        if self._rank == 0 and self._run is None:
            return
        latest = self._latest()
        if latest and latest != self._current:
            raise Superseded(f"worker {self._who} is of an attempt of the run that has been followed by another one.")

    def another(self, failure: rendezvous.Refused) -> bool:
        """Whether `part` may find another attempt after one that this worker could not join."""
        if self._rank == 0 or (self._run is None and not isinstance(failure, Superseded)):
            return False
        self._tried.add(self._current)
        self._failure = failure
        return True

    def _latest(self) -> str:
        return bytes(self._store.get(self._key)).decode() if self._store.check([self._key]) else ""

    def _announce(self) -> str:
        """Rank 0 begins an attempt."""
        before = self._count_of(self._latest())
        if self._count and before and int(before) > int(self._count):
            raise Superseded(
                f"worker {self._who} is of attempt {self._count} of the run, but attempt {before} has begun."
            )
        name = f"{self._run}/{self._count}-{secrets.token_hex(8)}"
        self._store.set(self._key, name)
        self._store.set(ATTEMPT, name)  # for members that are not of the run
        return name

    def _count_of(self, attempt: str) -> str:
        return attempt.rpartition("/")[2].partition("-")[0]

    def _find(self) -> str:
        """Another rank looks for the attempt that it is of; "" if rank 0 is not of the run."""
        pause = _SOONEST
        while True:
            latest = self._latest()
            if latest and latest not in self._tried and not self._is_over(latest):
                return latest
            if not latest and rendezvous.has_rank_0(self._store):
                return ""
            if not self._wait.left:
                raise self._failure or TelegradError(
                    f"worker {self._who} waited {self._wait.timeout:g} s for the worker with rank 0 of the run"
                    f" {self._run} to begin. Has it been started?"
                )
            if latest:
                time.sleep(min(pause, self._wait.pause()))
                pause = min(2 * pause, _LATEST)
            else:
                wait_for_keys(self._store, [self._key], Wait(self._who, min(_OFTEN, self._wait.pause())), self._awaited)
            self._wait.step(self._awaited)

    def _awaited(self) -> tuple[str, str]:
        place = place_of(self._store)
        return f"rank 0 of the run {self._run}{f' at {place}' if place else ''}", str(self._failure or "")

    def _is_over(self, attempt: str) -> bool:
        """Whether an attempt is not this worker's: its group is complete, or its only agent counts otherwise."""
        count = self._count_of(attempt)
        if self._count and count and count != self._count:
            return True
        return rendezvous.has_list(Part(attempt, self._store))

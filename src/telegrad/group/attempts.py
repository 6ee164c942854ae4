"""Attempts of a torchrun run, kept apart in a store that outlives them.

When a worker fails, torchrun ends all workers and starts them again. The store belongs to its agent and still has the
keys of the previous attempt. The environment does not number the attempts: an agent counts only the restarts that its
own workers caused, not those of other agents, and not a change of members. So the worker with rank 0 announces each
attempt under a unique name, which begins with the run's id and its agent's count. All keys of a static group have this
name as prefix. The other ranks follow rank 0. They skip an attempt if its group is complete without them, and move on
when a later one is announced.

A worker may come back to an attempt whose group is complete while other workers of that group are alive: their leases
are renewed. As torchrun usually restarts all workers, another rank than 0 first waits for a new attempt, for the
lifetime of a lease. A store that outlives its groups, as etcd, has attempts without torchrun as well.

A group may have members that torchrun did not start. They meet rank 0 under the announced name. If torchrun did not
start rank 0, all members meet without an announced name.
"""

import os
import secrets
import time

from telegrad.errors import TelegradError
from telegrad.group import rendezvous
from telegrad.group.group_store import group_store_of, outlives_groups
from telegrad.group.lease import read_lease
from telegrad.group.process_identity import GONE, RUNNING, fate_of, own_process
from telegrad.group.store_parts import ATTEMPT
from telegrad.group.store_waits import Part, Store, place_of, read_when_written
from telegrad.protocols.leases import Timing, Watch, process_of
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
        timing: times of the leases of the group.
    """

    def __init__(self, store: Store, name: str, rank: int, timeout: float, timing: Timing) -> None:
        self._store = store
        self._waiter = f"{name} (rank {rank})"
        self._rank = rank
        self._wait = Wait(self._waiter, timeout)
        self._timing = timing
        self._pulses: dict[str, _Pulse] = {}
        self._run = os.environ.get("TORCHELASTIC_RUN_ID") or ("" if outlives_groups(store) else None)
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
            self._current = "" if self._run is None else self._announce() if self._run else self._begin()
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
        ended = isinstance(failure, rendezvous.GroupEnded)
        if ended and not self._current:  # rank 0 is outside of the run: the next group meets in another part
            return False
        self._tried.add(self._current)
        if not ended:
            self._failure = failure
        return True

    def _latest(self) -> str:
        return bytes(self._store.get(self._key)).decode() if self._store.check([self._key]) else ""

    def _begin(self) -> str:
        """Return the latest attempt if its group lives, otherwise announce a new one.

        For rank 0 without torchrun.
        """
        latest = self._latest()
        if latest and self._is_complete(latest) and not self._has_ended(latest):
            pulse = self._pulse_of(latest)
            while (lives := pulse.observe()) is None:
                time.sleep(_MAX_PAUSE)
            if lives:
                return latest
        return self._announce()

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
            if latest and latest not in self._tried and self._has_room(latest):
                return latest
            if not latest and "" not in self._tried and rendezvous.has_rank_0(self._store):
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
                read_when_written(
                    self._store, [self._key], Wait(self._waiter, min(_RUN_CHECK, self._wait.pause())), self._awaited
                )
            self._wait.step(self._awaited)

    def _awaited(self) -> tuple[str, str]:
        place = place_of(self._store)
        return f"rank 0 of the run {self._run}{f' at {place}' if place else ''}", str(self._failure or "")

    def _has_other_count(self, attempt: str) -> bool:
        """Return whether the count of the only agent differs from that of this worker."""
        count = self._count_of(attempt)
        return bool(self._count and count and count != self._count)

    def _has_room(self, attempt: str) -> bool:
        """Return whether another rank than 0 may join an attempt, or come back to it."""
        if self._has_other_count(attempt):
            return False
        if not self._is_complete(attempt):
            return True
        if self._has_ended(attempt):
            return False
        pulse = self._pulse_of(attempt)
        lives = pulse.observe()
        if lives is False:
            del self._pulses[attempt]  # a worker that was stopped may renew its lease again
        return bool(lives) and (not self._run or pulse.goes_on)

    def _is_complete(self, attempt: str) -> bool:
        return rendezvous.has_list(Part(attempt, self._store))

    def _has_ended(self, attempt: str) -> bool:
        return rendezvous.has_ended(Part(attempt, self._store))

    def _pulse_of(self, attempt: str) -> "_Pulse":
        found = self._pulses.get(attempt)
        if found is None:
            found = self._pulses[attempt] = _Pulse(Part(attempt, self._store), self._rank, self._timing)
        return found


class _Pulse:
    """Observation of the leases of a group: whether other workers of it live."""

    def __init__(self, part: Store, rank: int, timing: Timing) -> None:
        self._store = group_store_of(part)
        self._timing = timing
        others = [each for each in range(rendezvous.world_size_of(part)) if each != rank]
        now = time.monotonic()
        self._watches = {each: Watch(timing, now, self._read(each)) for each in others}

    def _read(self, rank: int) -> str | None:
        return read_lease(self._store, rank, None)  # the secret is not known yet

    @property
    def goes_on(self) -> bool:
        """Whether another worker still renews its lease after the lifetime of a lease."""
        return any(watch.changed >= watch.begun + watch.timing.lifetime for watch in self._watches.values())

    def observe(self) -> bool | None:
        """Return whether another worker lives; None if that is not known yet.

        A live worker may be unable to renew its lease for a while, so only the end of the lease or the process counts.
        """
        now = time.monotonic()
        for rank, watch in list(self._watches.items()):
            watch.observe(now, self._read(rank))
            process = process_of(watch.value)
            fate = fate_of(process)
            if watch.renewals or (fate == RUNNING and process != own_process()):
                return True
            if watch.has_expired(now) or fate == GONE:
                del self._watches[rank]
        return None if self._watches else False

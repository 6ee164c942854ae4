"""Leases: which members of a group are alive, as one worker observes them.

A member renews its lease in the store of the group. Each renewal changes the value. An observer reads the value from
time to time and notes when it changed, on its own clock: no clock is compared with that of another host. A lease has
expired if the observer has watched it for its lifetime without a change, or if it was released or deleted. The lifetime
is an option of the member, and part of the value: an observer may have been given another one.

A value that the member has not written does not count (`NOT_RENEWED`): it neither renews the lease nor ends it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "NOT_RENEWED",
    "Key",
    "Timing",
    "Watch",
    "holder_of",
    "lease_value",
    "name_of",
    "process_of",
    "released_value",
    "to_observe",
]

T = TypeVar("T")

Key = tuple[int, int]  # id and incarnation of a member
_RENEWALS = 8  # within the lifetime of a lease: several may be late before it expires
_OBSERVATIONS = 4  # of the leases of others within that time, and of the log
_NEIGHBORS = 2  # leases that a member observes: if both members fail at once, other observers remain for one

_RELEASED = "released"  # instead of the process
_LAST = 1 << 62  # count of a released lease

NOT_RENEWED = ""
"""Observation of a lease that the observed member has not written."""


def lease_value(incarnation: int, process: str, count: int, lifetime: float = 0, name: str = "") -> str:
    """Return the value of a lease after the given number of renewals.

    Args:
        incarnation: Incarnation of the holder.
        process: Process of the holder.
        count: Number of renewals.
        lifetime: Lifetime of the lease in seconds; 0 for that of the observer.
        name: Name of the holder.
    """
    return json.dumps([incarnation, process, count, lifetime, name])


def released_value(incarnation: int, name: str = "") -> str:
    """Return the value of the lease of a worker that has left."""
    return lease_value(incarnation, _RELEASED, _LAST, 0, name)


def _field(lease: str | None, index: int, convert: Callable[[Any], T], default: T) -> T:
    """Return a field of the value of a lease, which anyone may have written."""
    try:
        return convert(json.loads(lease or "null")[index])
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError):
        return default


def holder_of(lease: str | None) -> int:
    """Return the incarnation that has written a lease; -1 if none has."""
    return _field(lease, 0, int, -1)


def process_of(lease: str | None) -> str:
    """Return the process that holds a lease; "" if none does."""
    return _field(lease, 1, str, "")


def name_of(lease: str | None) -> str:
    """Return the name of the holder of a lease; "" if it has none."""
    return _field(lease, 4, str, "")


def _count_of(lease: str | None) -> int:
    return _field(lease, 2, int, -1)


def _lifetime_of(lease: str | None) -> float:
    """Return the lifetime in the value of a lease; 0 if it has none."""
    lifetime = _field(lease, 3, float, 0.0)
    return lifetime if 0 < lifetime < math.inf else 0


class Timing(NamedTuple):
    """Times of a lease in seconds, which follow from its lifetime."""

    lifetime: float

    @property
    def renewal(self) -> float:
        """Seconds between two renewals."""
        return self.lifetime / _RENEWALS

    @property
    def observation(self) -> float:
        """Seconds between two observations of other leases."""
        return self.lifetime / _OBSERVATIONS

    @property
    def silence(self) -> float:
        """Seconds within which a live member renews its lease, with some slack."""
        return 1.2 * self.renewal


class Watch:
    """Observation of the lease of one member.

    If the observer itself was late, for example stopped or waiting for the store, the observation begins again: the
    member may have been unable to renew its lease for the same reason.

    Args:
        timing: Times of the observer, which apply to a value without a lifetime.
        now: Time of the first observation.
        value: Value of the lease at that time; None if there is none.
    """

    def __init__(self, timing: Timing, now: float, value: str | None) -> None:
        self._own = timing
        self._observed = now
        self.timing: Timing = timing
        self.begun: float = now
        self.value: str | None = value
        self.changed: float = now
        self.renewals: int = 0
        self._read_lifetime()

    @property
    def released(self) -> bool:
        """Whether the member has left."""
        return process_of(self.value) == _RELEASED

    @property
    def ended(self) -> bool:
        """Whether the member has released the lease, or the store has deleted it."""
        return self.value is None or self.released

    def observe(self, now: float, value: str | None) -> None:
        """Note the current value of the lease."""
        if now - self._observed > self._own.observation + self.timing.renewal:
            self.begun = self.changed = now
        self._observed = now
        if value not in (self.value, NOT_RENEWED) and not self._is_old(value):
            self.value, self.changed = value, now
            self.renewals += not self.ended
            self._read_lifetime()

    def _is_old(self, value: str | None) -> bool:
        """Return whether the holder wrote this before what was observed.

        Then another program has written it again.
        """
        seen = _count_of(self.value)
        return seen >= 0 and holder_of(value) == holder_of(self.value) and _count_of(value) <= seen

    def _read_lifetime(self) -> None:
        lifetime = _lifetime_of(self.value)
        self.timing = Timing(lifetime) if lifetime else self._own

    def is_silent(self, now: float) -> bool:
        """Return whether a live member would have renewed the lease by now."""
        return not self.renewals and now - self.begun >= self.timing.silence

    def is_late(self, now: float) -> bool:
        """Return whether the member may have ended: renewals are missing."""
        return self.is_silent(now) or now - self.changed >= self.timing.lifetime / 2

    def has_expired(self, now: float) -> bool:
        """Return whether the lease has ended, or was not renewed for its lifetime."""
        return self.ended or now - self.changed >= self.timing.lifetime


def to_observe(members: Sequence[Key], watches: Mapping[Key, Watch], now: float) -> set[Key]:
    """Return the members that one observes: the next two, and more if those are late.

    If a host dies with many members, waiting for the end of two leases at a time would take long. So each late member
    adds two, and what was once observed remains so until it has renewed its lease.

    Args:
        members: The other members, beginning with the next one.
        watches: What has been observed of them.
        now: The time.
    """
    observed: set[Key] = set()
    left = _NEIGHBORS
    for key in members:
        if not left:
            break
        watch = watches.get(key)
        left += 1 if watch is not None and watch.is_late(now) else -1
        observed.add(key)
    doubtful = {key for key, watch in watches.items() if not watch.renewals or watch.is_late(now)}
    return observed | doubtful & set(members)

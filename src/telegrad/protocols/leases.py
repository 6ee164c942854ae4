"""Leases: which members of a group are alive, as one worker observes them.

A member renews its lease in the store of the group. Each renewal changes the value. An observer reads the value from
time to time and notes when it changed, on its own clock: no clock is compared with that of another host. A lease has
expired if the observer has watched it for the lifetime of leases without a change, or if it was released or deleted.
"""

from typing import NamedTuple

__all__ = ["RELEASED", "Timing", "Watch"]

RELEASED = "released"
"""Value of the lease of a worker that has left."""


class Timing(NamedTuple):
    """Times of the leases of a group in seconds, which follow from their lifetime."""

    lifetime: float

    @property
    def renewal(self) -> float:
        """Seconds between two renewals: several may be late before the lease expires."""
        return self.lifetime / 8

    @property
    def patience(self) -> float:
        """Seconds within which a live member renews its lease, with some slack."""
        return 1.2 * self.renewal


class Watch:
    """Observation of the lease of one member.

    If the observer itself was late, for example stopped or waiting for the store, the observation begins again: the
    member may have been unable to renew its lease for the same reason.

    Args:
        timing: Times of the leases of the group.
        now: Time of the first observation.
        value: Value of the lease at that time; None if there is none.
    """

    def __init__(self, timing: Timing, now: float, value: str | None) -> None:
        self._timing = timing
        self._observed = now
        self.begun: float = now
        self.value: str | None = value
        self.changed: float = now
        self.renewals: int = 0

    @property
    def released(self) -> bool:
        """Whether the member has left."""
        return self.value == RELEASED

    @property
    def ended(self) -> bool:
        """Whether the member has released the lease, or the store has deleted it."""
        return self.value is None or self.released

    def observe(self, now: float, value: str | None) -> None:
        """Note the current value of the lease."""
        if now - self._observed > 2 * self._timing.renewal:
            self.begun = self.changed = now
        self._observed = now
        if value != self.value:
            self.value, self.changed = value, now
            self.renewals += not self.ended

    def is_silent(self, now: float) -> bool:
        """Return whether a live member would have renewed the lease by now."""
        return not self.renewals and now - self.begun >= self._timing.patience

    def has_expired(self, now: float) -> bool:
        """Return whether the lease has ended, or was not renewed for its lifetime."""
        return self.ended or now - self.changed >= self._timing.lifetime

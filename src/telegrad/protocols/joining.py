"""Join of a newcomer: which members it has to reach before it is a member.

A newcomer connects to each member first. A member that completes the handshake has proven that both have the same
secret and wire version and reach each other. Otherwise the lease of the member decides:

- The member renews its lease, so it is alive, and the connection fails: the newcomer must not join.
- The member refuses the newcomer: it must not join.
- The member neither completes the handshake nor renews its lease, as a stopped process: the newcomer joins without
  waiting for it. The member stays in the group until its lease expires; a join never removes it.
- The member has ended: its process is gone, or it has left.
"""

from typing import NamedTuple

from telegrad.protocols.leases import Timing, Watch

__all__ = ["Newcomer", "Refusal"]


class Refusal(NamedTuple):
    """A live member that the newcomer cannot reach, or that refuses it."""

    member: int
    why: str


class _Attempt:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.failure: str | None = None
        self.refused = False


class Newcomer:
    """Attempts of one newcomer to reach the members of a group.

    Args:
        timing: Times of the leases of the group.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._attempts: dict[int, _Attempt] = {}
        self._known: set[int] = set()  # ids that it has connected to, or must not wait for
        self.silent: set[int] = set()
        """Members that neither answered nor renewed their leases."""

    def require(self, member: int, now: float, lease: str | None) -> bool:
        """Require a connection to a member.

        Returns:
            Whether the requirement is new.
        """
        if member in self._known or member in self._attempts:
            return False
        self._attempts[member] = _Attempt(Watch(self._timing, now, lease))
        return True

    def drop(self, member: int) -> None:
        """Drop the requirement for a member that has left the group.

        A new process may get its id.
        """
        self._attempts.pop(member, None)
        self._known.discard(member)
        self.silent.discard(member)

    def forget(self, member: int) -> None:
        """Meet the requirement for a member.

        It is connected or silent, or its process is gone.
        """
        if self._attempts.pop(member, None) is not None:
            self._known.add(member)

    def connected(self, member: int) -> None:
        """Note the end of a handshake with a member."""
        self.silent.discard(member)
        self.forget(member)

    def failed(self, member: int, why: str, refused: bool) -> None:
        """Note that the connection to a member failed.

        Args:
            member: Id of the member.
            why: The reason.
            refused: The member itself has refused the newcomer, or has not proven the secret of the group.
        """
        attempt = self._attempts.get(member)
        if attempt is not None:
            attempt.failure, attempt.refused = why, refused

    def observe(self, member: int, now: float, lease: str | None) -> None:
        """Note the current lease of a member."""
        attempt = self._attempts.get(member)
        if attempt is None:
            return
        attempt.watch.observe(now, lease)
        if attempt.watch.released:  # a missing value is judged as silence: the store may have deleted it
            self.forget(member)

    def waiting_for(self) -> list[int]:
        """Return the members that are neither connected nor excused."""
        return sorted(self._attempts)

    def judge(self, now: float) -> Refusal | None:
        """Excuse the members that are silent, and return a reason not to join, if any."""
        for member, attempt in sorted(self._attempts.items()):
            if attempt.failure is not None and (attempt.refused or attempt.watch.renewals):
                return Refusal(member, attempt.failure)
            if attempt.watch.is_silent(now):
                self.silent.add(member)
                self.forget(member)
        return None

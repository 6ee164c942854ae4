"""Processes that a worker has lost: which one an error is about."""

from typing import Self

from telegrad.wire import LossText

__all__ = ["LossReason", "Losses"]

_KEPT = 8  # reasons of one worker; a process has at most a few: of its session, and of the group


class LossReason(str):
    """Reason of a loss that is kept, with the incarnation of the process.

    Errors and messages contain it as a plain ``str``.
    """

    __slots__ = ("incarnation",)

    incarnation: int

    def __new__(cls, why: str, incarnation: int) -> Self:
        self = super().__new__(cls, why)
        self.incarnation = incarnation
        return self


class Losses:
    """Ended processes of the other workers, by id, with the reasons."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[tuple[int, str], ...]] = {}  # incarnations and reasons, the last one last

    def record(self, worker_id: int, incarnation: int, reason: str) -> None:
        """Record the end of a process, or of its session; 0 is an unknown process."""
        ends = self._ends.get(worker_id, ())
        if incarnation and (incarnation, reason) not in ends[-1:]:
            self._ends[worker_id] = (*ends, (incarnation, reason))[-_KEPT:]

    def forget(self, worker_id: int) -> None:
        """Forget the processes of a worker."""
        self._ends.pop(worker_id, None)

    def incarnations(self, worker_id: int) -> list[int]:
        """Return the ended processes of a worker, the last one first."""
        return [incarnation for incarnation, _ in reversed(self._ends.get(worker_id, ()))]

    def find(self, worker_id: int, why: str, connected: int, newest: int) -> int:
        """Return the incarnation of the process that an error is about.

        The core reports the end of a call by its reason, maybe before or after the end of the session, and after the
        group has a new process of the name.

        Args:
            worker_id: Id of the worker.
            why: Reason of its loss.
            connected: Incarnation of the process with a session; 0 if there is none.
            newest: Incarnation of its newest known process; 0 if there is none.
        """
        if isinstance(why, LossReason):
            return why.incarnation
        ends = reversed(self._ends.get(worker_id, ()))
        ended = next((incarnation for incarnation, reason in ends if reason == why), 0)
        if ended and (not connected or why.startswith(LossText.REPLACED)):
            return ended
        return connected or newest

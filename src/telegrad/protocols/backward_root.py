"""Ledger of the root: outstanding messages and the latest state of each worker.

The multiset `outstanding` is produced minus consumed, over all reports received. It is empty exactly when no message is
in flight and no stage is running. Proof: suppose a message is in flight or being processed. An event produced it.

- If the report of that event has arrived, the message is in the multiset, and no report has removed it.
- Otherwise the message that caused that event is not reported as consumed, because one report has both. That message is
  in the multiset, or the report of its own producer is missing. The argument repeats back to the root's own sends,
  which are entered when they are sent.

A message that is consumed before the report of its production arrives counts -1, so the multiset is not empty either.
"""

from telegrad.protocols.backward_messages import Report, Token

__all__ = ["Ledger"]


class Ledger:
    """The root's counts of one pass."""

    __slots__ = ("_states", "finishing", "known", "mark_phase_begun", "notified", "outstanding", "where")

    def __init__(self) -> None:
        self.outstanding: dict[Token, int] = {}  # never 0
        self.where: dict[Token, int] = {}  # token -> the worker that is to process it
        self.known: set[int] = set()  # participants: workers that reported, and receivers of reported messages
        self.notified: set[int] = set()  # workers notified that the mark phase has ended, or to finish
        self.mark_phase_begun: bool = False
        self.finishing: bool = False
        self._states: dict[int, Report] = {}  # worker -> its latest report

    def enter(self, worker: int, report: Report) -> None:
        for token, to in report.produced:
            self.where[token] = to
            self.known.add(to)
            self._count(token, 1)
        for token in report.consumed:
            self._count(token, -1)
        self.known.add(worker)
        before = self._states.get(worker)
        if before is None or before.event < report.event:
            self._states[worker] = report

    def _count(self, token: Token, change: int) -> None:
        count = self.outstanding.pop(token, 0) + change
        if count:
            self.outstanding[token] = count

    def blocked(self) -> set[int]:
        return {worker for worker, report in self._states.items() if report.blocked}

    def deferred(self) -> set[int]:
        return {worker for worker, report in self._states.items() if report.deferred}

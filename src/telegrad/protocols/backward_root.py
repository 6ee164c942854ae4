"""What the root of a backward pass knows: the messages that are outstanding, and how each worker stands.

The multiset `outstanding` is produced minus consumed, of all reports that have come. It is empty exactly when nothing
is in flight and nobody is running. For suppose a message is in flight, or being processed. It was produced by an
event. If the report of that event has come, the message is in the multiset, and nothing has taken it out. If not, then
the message whose processing was that event has not been reported as consumed, because an event reports both at once;
that message is either in the multiset, or its own producer's report has not come; and so on back to the root's own
sends, which are entered as they are made. A message consumed before its production is heard of counts -1 for a while:
then, too, the multiset is not empty.
"""

from .backward_messages import Report, Token

__all__ = ["Ledger"]


class Ledger:
    """The root's books of one pass."""

    __slots__ = ("_states", "finishing", "known", "outstanding", "told", "wave_begun", "where")

    def __init__(self) -> None:
        self.outstanding: dict[Token, int] = {}  # never 0
        self.where: dict[Token, int] = {}  # token -> the worker that is to process it
        self.known: set[int] = set()  # who takes part: who reported, and to whom anybody sent
        self.told: set[int] = set()  # who has heard that the marking wave is over, or that the end has come
        self.wave_begun: bool = False
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

"""Counts of a soak: operations, faults, and failures that no fault explains."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SLACK = 2.0  # s that news of a fault may take on a busy machine
LOSS = ("WorkerLost", "OwnerLost")
GONE = (*LOSS, "UnknownWorker", "RRefDeleted")  # errors of operations with a member that is gone
NOT_SENT_AGAIN = "it was not sent again"  # part of the error of a message whose connection broke, and no session ended
HUNG = ("RpcTimeout", "RRefTimeout")


class Failure(NamedTuple):
    """An operation that raised."""

    kind: str
    members: tuple[str, ...]  # all that took part, the caller too
    begun: float
    ended: float
    error: str  # name of the type
    text: str


@dataclass
class Fault:
    """A fault, and the members whose operations it may fail."""

    kind: str
    members: tuple[str, ...]
    begun: float
    ended: float = float("inf")
    allows: tuple[str, ...] = GONE  # names of the errors
    says: str = ""  # part of their texts
    noticed_after: float = 0.0  # s until all have noticed it at the latest, also after `ended`

    def explains(self, failure: Failure) -> bool:
        if failure.error not in self.allows or self.says not in failure.text:
            return False
        if not set(self.members) & set(failure.members):
            return False
        last = max(self.ended, self.begun + self.noticed_after) + SLACK
        return self.begun - 0.5 <= failure.ended and failure.begun <= last


@dataclass
class Ledger:
    """Counts of a run."""

    operations: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, done: dict[str, int], failed: Iterable[Sequence[Any]], wrong: Iterable[str]) -> None:
        self.operations.update(done)
        self.failures.extend(Failure(*one) for one in failed)
        self.wrong.extend(wrong)

    def unexplained(self) -> list[Failure]:
        return [failure for failure in self.failures if not any(fault.explains(failure) for fault in self.faults)]

    def as_json(self) -> dict[str, Any]:
        unexplained = self.unexplained()
        left = set(map(id, unexplained))
        explained = Counter(
            next(fault.kind for fault in self.faults if fault.explains(failure))
            for failure in self.failures
            if id(failure) not in left
        )
        return {
            "operations": dict(sorted(self.operations.items())),
            "faults": dict(sorted(Counter(fault.kind for fault in self.faults).items())),
            "failed by a fault": dict(sorted(explained.items())),
            "wrong": len(self.wrong),
            "lost": sum(failure.error in HUNG for failure in unexplained),
            "false losses": sum(failure.error in LOSS for failure in unexplained),
            "other failures": sum(failure.error not in LOSS + HUNG for failure in unexplained),
            "details": [*self.wrong[:20], *(str(failure._asdict()) for failure in unexplained[:20])],
        }

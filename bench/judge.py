"""What the figures say: which goals are reached, and who is ahead of us."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.figures import Figure, figure
from bench.row import LIMIT, OURS, Family
from bench.schedule import Results


@dataclass(frozen=True)
class Verdict:
    """One goal of one row."""

    text: str
    value: float | None  # None: what it takes was not measured
    met: bool | None


@dataclass(frozen=True)
class Judged:
    """One row with everything that is known of it."""

    family: str
    name: str
    unit: str
    amount: float
    of: str
    figures: Mapping[str, Figure]  # by peer, and of the limit
    absent: Mapping[str, str]  # why a peer has none
    verdicts: Sequence[Verdict]
    ahead: Sequence[str]  # the peers that beat us
    apart: Mapping[str, Sequence[float]] = field(default_factory=dict)  # seconds, by peer, for each round: see cores.py
    judged: bool = True  # False: a row without verdict, in which no peer counts as ahead

    def as_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "row": self.name,
            "unit": self.unit,
            "amount": self.amount,
            "of": self.of,
            "figures": {name: one.as_json() for name, one in self.figures.items()},
            "absent": dict(self.absent),
            "goals": [vars(verdict) for verdict in self.verdicts],
            "ahead": list(self.ahead),
            "apart": {name: list(rounds) for name, rounds in self.apart.items()},
            "judged": self.judged,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Judged":
        """Read a row as it was written; which peers are ahead is computed from its figures."""
        figures = {name: Figure.from_json(one) for name, one in data["figures"].items()}
        judged = data.get("judged", True)
        return cls(
            data["family"],
            data["row"],
            data["unit"],
            data["amount"],
            data["of"],
            figures,
            data["absent"],
            [Verdict(**verdict) for verdict in data["goals"]],
            ahead_of_us(figures) if judged else [],
            data.get("apart", {}),
            judged,
        )


def judge(families: Sequence[Family], results: Results) -> list[Judged]:
    """All rows that were measured, in the order of the table."""
    found = []
    for family in families:
        for row in family.rows:
            rounds = results.rounds.get(row.name, {})
            figures = {who: figure(of, row.resolution) for who, of in rounds.items()}
            absent = {who: why for who, why in results.absent.get(row.name, {}).items() if who not in figures}
            medians = {who: one.median for who, one in figures.items()}
            verdicts = []
            for goal in row.goals:
                value, met = goal.reached(medians) or (None, None)
                verdicts.append(Verdict(goal.text, value, met))
            found.append(
                Judged(
                    family.name,
                    row.name,
                    row.unit,
                    row.amount,
                    row.of,
                    figures,
                    absent,
                    verdicts,
                    ahead_of_us(figures) if row.verdict else [],
                    results.apart.get(row.name, {}),
                    row.verdict,
                )
            )
    return found


def ahead_of_us(figures: Mapping[str, Figure]) -> list[str]:
    """The peers whose median is lower than ours by more than the two spreads together."""
    ours = figures.get(OURS)
    if ours is None:
        return []
    return [
        who
        for who, theirs in figures.items()
        if who != OURS and not who.startswith(LIMIT) and ours.median - theirs.median > ours.spread + theirs.spread
    ]


def failures(rows: Sequence[Judged]) -> list[str]:
    """Why `make bench-check` fails, a line each: peers that are ahead of us, and rows in which we have no figure."""
    lines = []
    for row in rows:
        for who in row.ahead:
            ours, theirs = row.figures[OURS].median, row.figures[who].median
            lines.append(f"{row.name}: {who} is ahead of us, {ours / max(theirs, 1e-12):.2f} times")
        why = row.absent.get(OURS, "")
        if why.startswith(("failed", "cannot")):
            lines.append(f"{row.name}: {OURS} {why}")
    return lines

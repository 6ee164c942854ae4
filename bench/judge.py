"""Verdicts on the figures: reached goals, and peers ahead of Telegrad."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.figures import Figure, figure
from bench.row import LIMIT, OURS, Family
from bench.schedule import Results


@dataclass(frozen=True)
class Verdict:
    """Goal of a row, with its value."""

    text: str
    value: float | None  # None: not measured
    met: bool | None


@dataclass(frozen=True)
class Judged:
    """Row with its figures and verdicts."""

    family: str
    name: str
    unit: str
    amount: float
    of: str
    figures: Mapping[str, Figure]  # by peer, and of the limit
    absent: Mapping[str, str]  # peer -> why it has no figure
    verdicts: Sequence[Verdict]
    ahead: Sequence[str]  # the peers faster than Telegrad
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
        """Read a row from JSON; the peers that are ahead are computed from its figures."""
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
    """Return the measured rows in the order of the table."""
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
    """Return the peers with a median below Telegrad's by more than both spreads."""
    ours = figures.get(OURS)
    if ours is None:
        return []
    return [
        who
        for who, theirs in figures.items()
        if who != OURS and not who.startswith(LIMIT) and ours.median - theirs.median > ours.spread + theirs.spread
    ]


def failures(rows: Sequence[Judged]) -> list[str]:
    """Return why `make bench-check` fails, a line per reason.

    Reasons are peers ahead of Telegrad, and rows without a figure of Telegrad.
    """
    lines = []
    for row in rows:
        for who in row.ahead:
            ours, theirs = row.figures[OURS].median, row.figures[who].median
            lines.append(f"{row.name}: {who} is ahead of us, {ours / max(theirs, 1e-12):.2f} times")
        why = row.absent.get(OURS, "")
        if why.startswith(("failed", "cannot")):
            lines.append(f"{row.name}: {OURS} {why}")
    return lines

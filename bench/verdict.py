"""Verdicts on the figures: reached goals, and competitors ahead of Telegrad."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.figures import Figure, figure
from bench.row import BASELINE, OURS, Family
from bench.schedule import Results


@dataclass(frozen=True)
class GoalVerdict:
    """Goal of a row, with its value."""

    text: str
    value: float | None  # None: not measured
    met: bool | None


@dataclass(frozen=True)
class RowVerdict:
    """Row with its figures and verdicts."""

    family: str
    name: str
    unit: str
    amount: float
    of: str
    figures: Mapping[str, Figure]  # by competitor, and of the baseline
    absent: Mapping[str, str]  # competitor -> reason for having no figure
    verdicts: Sequence[GoalVerdict]
    ahead: Sequence[str]  # the competitors faster than Telegrad
    apart: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by competitor: s in each round, see cores.py
    has_verdict: bool = True  # False: a row without verdict, in which no competitor counts as ahead

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
            "has verdict": self.has_verdict,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RowVerdict":
        """Read a row from JSON; compute the competitors ahead from its figures."""
        figures = {name: Figure.from_json(one) for name, one in data["figures"].items()}
        has_verdict = data["has verdict"]
        return cls(
            data["family"],
            data["row"],
            data["unit"],
            data["amount"],
            data["of"],
            figures,
            data["absent"],
            [GoalVerdict(**verdict) for verdict in data["goals"]],
            ahead_of_us(figures) if has_verdict else [],
            data.get("apart", {}),
            has_verdict,
        )


def row_verdicts(families: Sequence[Family], results: Results) -> list[RowVerdict]:
    """Return the measured rows in the order of the table."""
    found = []
    for family in families:
        for row in family.rows:
            rounds = results.rounds.get(row.name, {})
            figures = {name: figure(of, row.resolution) for name, of in rounds.items()}
            absent = {name: reason for name, reason in results.absent.get(row.name, {}).items() if name not in figures}
            medians = {name: one.median for name, one in figures.items()}
            verdicts = []
            for goal in row.goals:
                value, met = goal.reached(medians) or (None, None)
                verdicts.append(GoalVerdict(goal.text, value, met))
            found.append(
                RowVerdict(
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
    """Return the competitors with a median below Telegrad's by more than both spreads."""
    ours = figures.get(OURS)
    if ours is None:
        return []
    return [
        name
        for name, theirs in figures.items()
        if name != OURS and not name.startswith(BASELINE) and ours.median - theirs.median > ours.spread + theirs.spread
    ]


def failures(rows: Sequence[RowVerdict]) -> list[str]:
    """Return the reasons for which `make bench-check` fails, a line per reason.

    Reasons are competitors ahead of Telegrad, and rows without a figure of Telegrad.
    """
    lines = []
    for row in rows:
        for name in row.ahead:
            ours, theirs = row.figures[OURS].median, row.figures[name].median
            lines.append(f"{row.name}: {name} is {ours / max(theirs, 1e-12):.2f} x faster than {OURS}")
        reason = row.absent.get(OURS, "")
        if reason.startswith(("failed", "cannot")):
            lines.append(f"{row.name}: {OURS} {reason}")
    return lines

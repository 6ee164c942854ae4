"""The table as Markdown, for documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from bench import cores
from bench.figures import show, show_spread
from bench.machine import in_words
from bench.row import BASELINE, OURS, Family
from bench.verdict import RowVerdict


def markdown(
    rows: Sequence[RowVerdict], families: Sequence[Family], competitors: Sequence[str], about: Mapping[str, Any]
) -> str:
    """Return a table per family: medians, Telegrad's spread, and the goals."""
    lines = [in_words(about), ""]
    for family in families:
        chosen = [row for row in rows if row.family == family.name]
        measured = [name for name in competitors if any(name in row.figures for row in chosen)]
        if not measured:
            continue
        with_baseline = any(BASELINE in row.figures for row in chosen)
        columns = [*([BASELINE] if with_baseline else []), *measured]
        headings = [family.name, *columns, "goals"]
        cells = [[row.name, *(cell(row, name) for name in columns), goals(row)] for row in chosen]
        lines += [tabulate(cells, headings, tablefmt="pipe", disable_numparse=True), ""]
    if seen := [one for row in rows for rounds in row.apart.values() for one in rounds]:
        lines += [cores.in_words(seen), ""]
    return "\n".join(lines)


def cell(row: RowVerdict, name: str) -> str:
    one = row.figures.get(name)
    if one is None:
        return "-"
    text = show(one.median, row.unit)
    if name == OURS:
        text = f"{text} {show_spread(one, row.unit)}"
    return f"**{text}**" if name in row.ahead else text


def goals(row: RowVerdict) -> str:
    lines = [] if row.has_verdict else ["no verdict"]
    for verdict in row.verdicts:
        if verdict.value is None or verdict.met is None:
            lines.append(f"{verdict.text}: not measured")
        else:
            lines.append(f"{verdict.text}: {verdict.value:.3g}, {'met' if verdict.met else 'missed'}")
    return "; ".join(lines)

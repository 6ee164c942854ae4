"""Table with a line per row; columns: the baseline, Telegrad and competitors."""

from collections.abc import Mapping, Sequence
from string import ascii_lowercase

from rich.console import Console
from rich.table import Table

from bench import cores
from bench.competitors.table import COMPETITORS
from bench.figures import HOW, Figure, show, show_rate, show_spread
from bench.row import BASELINE, OURS, TORCH, Family
from bench.verdict import RowVerdict

WIDTH = 210  # a log file has no width of its own


def wide_console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    return console


def print_table(
    rows: Sequence[RowVerdict], families: Sequence[Family], competitors: Sequence[str], console: Console
) -> None:
    notes: dict[str, str] = {}
    for family in families:
        chosen = [row for row in rows if row.family == family.name]
        if chosen:
            console.print(table_of(chosen, family, competitors, notes))
    for reason, mark in notes.items():
        console.print(f"[dim]{mark}: {reason}[/]", soft_wrap=True)
    console.print(f"[dim]{HOW}[/]", soft_wrap=True)
    if seen := [one for row in rows for rounds in row.apart.values() for one in rounds]:
        console.print(f"[dim]{cores.in_words(seen)}[/]", soft_wrap=True)
    for name in competitors:
        console.print(f"[dim]{name}: {COMPETITORS[name].about}[/]", soft_wrap=True)


def table_of(rows: Sequence[RowVerdict], family: Family, competitors: Sequence[str], notes: dict[str, str]) -> Table:
    """Return the table of a family; add the reasons for empty cells to `notes`."""
    table = Table(title=f"[bold]{family.name}[/]: {family.about}", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column(BASELINE, justify="right", no_wrap=True)
    for name in competitors:
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name == OURS else "")
        if name in (OURS, TORCH):
            table.add_column("p99", justify="right", no_wrap=True)
    table.add_column("goals")
    for row in rows:
        cells = [row.name, median(row.figures.get(BASELINE), row.unit)]
        for name in competitors:
            one = row.figures.get(name)
            text = with_spread(one, row.unit) if one else f"[dim]{mark_of(row.absent, name, notes)}[/]"
            cells.append(f"[red]{text}[/]" if name in row.ahead else text)
            if name in (OURS, TORCH):
                cells.append(show(one.p99, row.unit) if one else "")
        table.add_row(*cells, "\n".join(goals(row)))
        if row.of:
            table.add_row(*rates(row, competitors), "")
    return table


def median(one: Figure | None, unit: str) -> str:
    return show(one.median, unit) if one else ""


def with_spread(one: Figure, unit: str) -> str:
    return f"{show(one.median, unit)} [dim]{show_spread(one, unit)}[/]"


def mark_of(absent: Mapping[str, str], name: str, notes: dict[str, str]) -> str:
    if name not in absent:
        return ""
    reason = absent[name].replace("[", "\\[")
    number = list(notes).index(reason) if reason in notes else len(notes)
    first, second = divmod(number, len(ascii_lowercase))
    return notes.setdefault(reason, (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second])


def goals(row: RowVerdict) -> list[str]:
    lines = [] if row.has_verdict else ["[dim]no verdict[/]"]
    for verdict in row.verdicts:
        if verdict.met is None or verdict.value is None:
            lines.append(f"[dim]{verdict.text}: not measured[/]")
        else:
            color, word = ("green", "met") if verdict.met else ("red", "missed")
            value = f"{verdict.value:.3g}"
            lines.append(f"{verdict.text}: {value} [{color}]{word}[/]")
    return lines


def rates(row: RowVerdict, competitors: Sequence[str]) -> list[str]:
    cells = [f"  [dim]{'' if row.of == 'bytes' else row.of + ' '}per second[/]"]
    for name in (BASELINE, *competitors):
        one = row.figures.get(name)
        cells.append(f"[dim]{show_rate(one.median, row.amount, row.of)}[/]" if one and one.median > 0 else "")
        if name in (OURS, TORCH):
            cells.append("")
    return cells

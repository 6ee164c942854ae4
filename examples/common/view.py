"""What a run shows: a live table on a terminal, plain lines elsewhere, and a figure at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 10  # rows of the live table


class View:
    """Shows the progress of a run of `total` steps. Use it as a context manager.

    On a terminal the newest rows and a bar stay in place; elsewhere every row is a line.
    """

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.done = 0
        self.rows: deque[dict[str, str]] = deque(maxlen=SHOWN)
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=8) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is None:
            self.print(self.title)
        else:
            self.live.start()
            self._refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def advance(self) -> None:
        """One more step is done, which needs no row."""
        self.done += 1
        self._refresh()

    def row(self, **figures: str) -> None:
        """One more step is done, with these figures; their names are headings, with spaces for underscores."""
        self.done += 1
        self.rows.append({name.replace("_", " "): figure for name, figure in figures.items()})
        if self.live is None:
            self.print("\t".join(f"{name} {figure}" for name, figure in self.rows[-1].items()))
        self._refresh()

    def print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def verdict(self, reached: bool, claim: str) -> bool:
        """The last line of a run; returns `reached`."""
        self.print(f"{'Reached' if reached else 'NOT REACHED'}: {claim}")
        return reached

    def _refresh(self) -> None:
        if self.live is None:
            return
        table = Table(min_width=60)
        for heading in self.rows[-1] if self.rows else ():
            table.add_column(heading, justify="right")
        for row in self.rows:
            table.add_row(*row.values())
        bar = ProgressBar(total=self.total, completed=min(self.done, self.total), width=60)
        self.live.update(Group(Text(self.title, style="bold"), table, bar))


def new_figure(title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes side by side."""
    from matplotlib.figure import Figure  # here, so that only the process that draws loads it

    figure = Figure(figsize=(max(8, 6 * panels), 4.5), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curves(
    axes: Axes,
    series: Mapping[str, Sequence[float]],
    x: str,
    y: str,
    *,
    every: int = 1,
    expected: Sequence[float] = (),
    goal: float | None = None,
) -> None:
    """Draw each named series over `every`, 2 `every`, ...; `x` and `y` name the axes, with units.

    Wide and pale below it, `expected` is what another way of computing the same gave. `goal` is a dashed line.
    """
    if expected:
        axes.plot(range(1, len(expected) + 1), expected, color="lightgray", linewidth=6, label="in one process")
    for name, values in sorted(series.items()):
        axes.plot(range(every, every * len(values) + 1, every), values, label=name, alpha=0.9)
    if goal is not None:
        axes.axhline(goal, color="tab:green", linestyle="--", label=f"goal: {goal:g}")
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


Span = tuple[str, float, float]
"""A name, whose first letter gives the colour, begin and end in seconds of a clock that all rows share."""


def timeline(axes: Axes, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Draw what each of some workers did when, one row each, the first on top."""
    zero = min(begin for _, spans in rows for _, begin, _ in spans)
    kinds = sorted({name[0] for _, spans in rows for name, _, _ in spans})
    for row, (_, spans) in enumerate(rows):
        for name, begin, end in spans:
            left, width = 1000 * (begin - zero), 1000 * (end - begin)
            axes.barh(row, width, left=left, color=f"C{kinds.index(name[0])}", edgecolor="white")
            axes.text(left + width / 2, row, name, ha="center", va="center", size=7)
    axes.set(title=title, xlabel="time [ms]", yticks=range(len(rows)), yticklabels=[label for label, _ in rows])
    axes.invert_yaxis()


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write the figure as PNG; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120, format="png")
    return path

"""View of a run: a live panel or plain lines, and a figure at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8  # rows of the live table


class View:
    """Progress of a run of `total` steps; a context manager for use by any thread.

    A terminal shows the state of each worker, the newest rows, and a bar with rate and remaining time, and updates
    them. Otherwise every row is a line, and states are not shown.
    """

    def __init__(self, title: str, total: int, unit: str = "steps", console: Console | None = None) -> None:
        self.title = title
        self.lock = Lock()
        self.rows: deque[dict[str, str]] = deque(maxlen=SHOWN)
        self.workers: dict[str, dict[str, str]] = {}
        self.console = console or Console(highlight=False)
        self.progress = Progress(
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            _Rate(unit),
            TextColumn("[dim]elapsed"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(title, total=total)
        live = Live(console=self.console, get_renderable=self.panel, refresh_per_second=8)
        self.live = live if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is None:
            self.print(self.title)
        else:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    @property
    def done(self) -> int:
        """Return the number of steps done so far."""
        return int(self.progress.tasks[0].completed)

    def worker(self, name: str, state: str, **figures: str) -> None:
        """Show a worker's state and its figures; the names of the figures are headings."""
        with self.lock:
            self.workers[name] = {"worker": name, "state": state, **_headings(figures)}

    def advance(self) -> None:
        """Count one more step, without a row."""
        self.progress.advance(self.task)

    def row(self, **figures: str) -> None:
        """Count one more step and show its figures.

        The names of the figures are headings, with spaces for underscores.
        """
        row = _headings(figures)
        with self.lock:
            self.rows.append(row)
        if self.live is None:
            self.print("\t".join(f"{name} {figure}" for name, figure in row.items()))
        self.advance()

    def print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def verdict(self, reached: bool, claim: str) -> bool:
        """Print the last line of a run; return `reached`."""
        self.print(f"{'Reached' if reached else 'NOT REACHED'}: {claim}")
        return reached

    def panel(self) -> Group:
        """Return the current content of the terminal."""
        with self.lock:
            tables = [_table(list(self.workers.values()), "bold cyan"), _table(list(self.rows), "bold")]
        shown = [Padding(table, (1, 0, 0, 0)) for table in tables if table.row_count]
        return Group(Text(self.title, style="bold"), *shown, Padding(self.progress.get_renderable(), (1, 0, 0, 0)))


class _Rate(ProgressColumn):
    """Steps per second over the last 30 s, or seconds per step if more than one."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text(f"- {self.unit}/s", style="magenta")
        one = self.unit.removesuffix("s")
        return Text(f"{speed:.1f} {self.unit}/s" if speed >= 1 else f"{1 / speed:.1f} s/{one}", style="magenta")


def _headings(figures: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", " "): figure for name, figure in figures.items()}


def _table(rows: Sequence[Mapping[str, str]], header: str) -> Table:
    headings = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, header_style=header, padding=(0, 3, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("worker", "state") else "right")
    for row in rows:
        table.add_row(*(row.get(heading, "") for heading in headings))
    return table


@dataclass(frozen=True)
class Score:
    """Accuracy, its goal, and the accuracy of the most frequent answer; from 0 to 1."""

    accuracy: float
    goal: float
    guess: float

    @property
    def reached(self) -> bool:
        return self.accuracy >= self.goal and self.accuracy > self.guess

    def __str__(self) -> str:
        return f"accuracy {self.accuracy:.1%}, goal {self.goal:.0%} (the most frequent answer alone: {self.guess:.1%})"


def new_figure(title: str, panels: int = 1, *, columns: int = 2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """Create a figure with `panels` axes, in rows of `columns`.

    `height` is that of a row in inches. The figure is as wide as a page, so that its text stays readable there.
    """
    from matplotlib.figure import Figure  # late, so that only the drawing process loads it

    rows, columns = -(-panels // columns), min(panels, columns)
    figure = Figure(figsize=(9, 0.4 + height * rows), layout="constrained")
    figure.suptitle(title)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
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
    """Draw each named series over `every`, 2 `every`, ...

    `x` and `y` are the labels of the axes, with units. `expected`, a wide and pale curve below the others, is the
    result of another way to compute the same. `goal` is a dashed line. Short series are drawn with markers, because a
    line of one point is invisible. Without any values the axes are hidden.
    """
    if not any(series.values()):
        axes.set_visible(False)
        return
    if expected:
        axes.plot(range(1, len(expected) + 1), expected, color="lightgray", linewidth=6, label="in one process")
    for name, values in sorted(series.items()):
        marker = "o" if len(values) < 20 else None
        axes.plot(range(every, every * len(values) + 1, every), values, label=name, alpha=0.9, marker=marker)
    if goal is not None:
        axes.axhline(goal, color="tab:green", linestyle="--", label=f"goal: {goal:g}")
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


Span = tuple[str, float, float]
"""Name (its first letter determines the color), begin and end in seconds of one clock for all rows."""


def timeline(axes: Axes, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Draw the spans of some workers over time, one row each, the first on top."""
    zero = min(begin for _, spans in rows for _, begin, _ in spans)
    kinds = sorted({name[0] for _, spans in rows for name, _, _ in spans})
    for row, (_, spans) in enumerate(rows):
        for name, begin, end in spans:
            left, width = 1000 * (begin - zero), 1000 * (end - begin)
            color = f"C{kinds.index(name[0])}"
            axes.barh(row, width, left=left, color=color, edgecolor="white", clip_on=False)  # clips need space in SVG
            axes.text(left + width / 2, row, name, ha="center", va="center", size=7)
    axes.set(title=title, xlabel="time [ms]", yticks=range(len(rows)), yticklabels=[label for label, _ in rows])
    axes.invert_yaxis()


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write the figure as PNG and, for documents, as SVG; return the path of the PNG.

    Creates the folder.
    """
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    # Text as text, which is small; equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    return path

"""Picture of a whole run, with a line per operation and a dot per competitor.

The scale is logarithmic. README.md shows docs/pictures/bench.svg, a copy from the documented run.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.competitors.table import COMPETITORS
from bench.figures import show
from bench.plots import COLORS
from bench.row import OURS
from bench.verdict import RowVerdict

ROWS = {
    "identity, int": "call with an int",
    "identity, 4 MB": "call with a 4 MB tensor, round trip",
    "1000 calls in flight, int": "1000 calls in flight",
    "1 to 7, 1 MB, one way, one for all": "1 MB tensor to 7 workers",
    "64 MB one way, plain": "64 MB tensor over TCP",
    "forward-backward over a call, 32x32": "forward and backward over a call",
    "ConvNet step, batch 8": "training step of a ConvNet",
    "init and shutdown, 32 workers": "start and shutdown, 32 workers",
}
"""The rows of the picture, all in seconds, and how it names them."""


def draw_summary(rows: Sequence[RowVerdict], path: Path) -> None:
    """Write the picture as SVG; without any of its rows, write nothing.

    Args:
        rows: all rows of a run.
        path: the file to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "bench"  # the same figures give the same file
    from matplotlib.figure import Figure as Picture

    by_name = {row.name: row for row in rows if OURS in row.figures}
    chosen = [(label, by_name[name].figures) for name, label in ROWS.items() if name in by_name]
    if not chosen:
        return
    made = Picture(figsize=(9, 1.3 + 0.42 * len(chosen)), layout="constrained")
    axes = made.add_subplot()
    for line, (_, figures) in enumerate(chosen):
        others = [figures[name].median for name in COMPETITORS if name in figures and name != OURS]
        ours = figures[OURS].median
        axes.hlines(line, ours, max([ours, *others]), color="#cccccc", lw=1, zorder=1)
        axes.annotate(show(ours, "s"), (ours, line), (-8, 0), textcoords="offset points", ha="right", va="center")
        if others:
            text, place = compare_with_best(ours, min(others)), (1.01, line)
            axes.annotate(
                text,
                place,
                xycoords=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
            )
    for name in COMPETITORS:
        lines = [line for line, (_, figures) in enumerate(chosen) if name in figures]
        if lines:
            medians = [chosen[line][1][name].median for line in lines]
            axes.scatter(medians, lines, s=70 if name == OURS else 36, color=COLORS[name], label=name, zorder=2)
    axes.set_yticks(range(len(chosen)), [label for label, _ in chosen])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time per operation, median (less is better)")
    ticks = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    axes.set_xticks(ticks, ["1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s", "10 s"])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.margins(y=0.08)
    values = [one.median for _, figures in chosen for one in figures.values()]
    axes.set_xlim(min(values) / 30, max(values) * 4)  # room for a figure to the left of the first dot
    made.legend(loc="outside upper center", ncols=len(COMPETITORS), frameon=False)
    made.savefig(path, metadata={"Date": None})


def compare_with_best(ours: float, best: float) -> str:
    """Compare Telegrad's cost with that of the best competitor."""
    return f"{best / ours:.2g} x faster than the next" if ours <= best else f"{ours / best:.2g} x slower than the best"

"""Pictures: one for each family, as PNG and SVG.

Each has a bar for each competitor, on a logarithmic scale, and a line for the baseline.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.competitors.table import COMPETITORS
from bench.figures import show
from bench.row import BASELINE, Family
from bench.verdict import RowVerdict

PALETTE = ("#d1495b", "#30638e", "#7fa6c9", "#edae49", "#00798c", "#8f6bb3", "#5c5c5c")
COLORS = dict(zip(dict.fromkeys((*COMPETITORS, "parent")), PALETTE, strict=True))
HEIGHT, GAP = 0.16, 0.35  # inches of a bar, and between rows
LEAST = 1e-9  # smallest value on the logarithmic scale


def draw(rows: Sequence[RowVerdict], families: Sequence[Family], folder: Path) -> list[Path]:
    """Write the pictures and return their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "bench"  # the same figures give the same file
    written = []
    for family in families:
        chosen = [row for row in rows if row.family == family.name and row.figures]
        for unit in sorted({row.unit for row in chosen}):
            same = [row for row in chosen if row.unit == unit]
            several = len({row.unit for row in chosen}) > 1
            name = f"{family.name}-{unit.replace(' ', '-').lower()}" if several else family.name
            written += picture(same, family, unit, folder / name)
    return written


def picture(rows: Sequence[RowVerdict], family: Family, unit: str, path: Path) -> list[Path]:
    from matplotlib.figure import Figure as Picture

    competitors = [name for name in COMPETITORS if any(name in row.figures for row in rows)]
    bars = sum(len([name for name in competitors if name in row.figures]) for row in rows)
    made = Picture(figsize=(9, 1.4 + bars * HEIGHT + len(rows) * GAP), layout="constrained")
    axes = made.add_subplot()
    position, ticks, labelled = 0.0, [], set()
    for row in rows:
        first = position
        for name in (one for one in competitors if one in row.figures):
            cost = row.figures[name]
            axes.barh(
                position,
                max(cost.median, LEAST),
                height=HEIGHT,
                color=COLORS[name],
                xerr=cost.spread,
                error_kw={"lw": 0.8},
                label=None if name in labelled else name,
            )
            axes.text(max(cost.median, LEAST) * 1.08, position, show(cost.median, unit), va="center", fontsize=6)
            labelled.add(name)
            position += HEIGHT
        if BASELINE in row.figures:
            line = (first - HEIGHT / 2, position - HEIGHT / 2)
            axes.vlines(
                row.figures[BASELINE].median,
                *line,
                colors="black",
                lw=1.5,
                label="" if BASELINE in labelled else BASELINE,
            )
            labelled.add(BASELINE)
        ticks.append(((first + position - HEIGHT) / 2, row.name))
        position += GAP
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    in_words = {"s": "seconds", "MB": "megabytes", "CPU s": "processor seconds"}[unit]
    axes.set_xlabel(f"{in_words}, median (less is better)")
    axes.set_title(f"{family.name}: {family.about}", fontsize=9, wrap=True)
    axes.grid(axis="x", which="major", alpha=0.3)
    axes.margins(x=0.15)
    axes.legend(fontsize=7, loc="best")
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    made.savefig(paths[0], dpi=130)
    made.savefig(paths[1], metadata={"Date": None})
    return paths

"""The summary picture of a run."""

from pathlib import Path

from bench.figures import Figure
from bench.rows.table import ROWS as ALL_ROWS
from bench.summary import ROWS, draw_summary
from bench.verdict import RowVerdict


def row(name: str, **medians: float) -> RowVerdict:
    figures = {competitor: Figure(median, 0.0, median, 1, (median,)) for competitor, median in medians.items()}
    return RowVerdict("calls", name, "s", 0.0, "", figures, {}, [], [])


def test_rows_exist() -> None:
    assert {ALL_ROWS[name].unit for name in ROWS} == {"s"}


def test_same_figures_give_same_file(tmp_path: Path) -> None:
    rows = [
        row("identity, int", telegrad=1e-6, torch=2e-6, Ray=3e-6),
        row("identity, 4 MB", telegrad=1.0, baseline=0.5),
        row("1000 calls in flight, int", telegrad=2.0, torch=3.0, Monarch=0.5),
    ]
    for name in ("a.svg", "b.svg"):
        draw_summary(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert text.count("<!-- call with") == 2
    assert "<!-- 2 x faster than the next -->" in text
    assert "<!-- 4 x slower than the best -->" in text


def test_no_picture_without_rows(tmp_path: Path) -> None:
    draw_summary([row("identity, int", torch=1.0), row("another row", telegrad=1.0)], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()

"""Terms of the glossary are unique. `test_paths.py` checks its paths."""

from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
TEXT = (REPO / "GLOSSARY.md").read_text()


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """Yield the rows of the tables that have a column `heading`."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if heading in cells:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set(cells[0]) <= {"-"}:
            yield cells


def test_there_are_terms() -> None:
    assert len(list(rows(TEXT, "lives in"))) > 50


def test_terms_have_one_row() -> None:
    terms = [row[0] for row in rows(TEXT, "lives in")]
    assert len(terms) == len(set(terms))

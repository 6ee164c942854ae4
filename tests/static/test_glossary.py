"""Terms of the glossary are unique and complete. `test_paths.py` checks its paths."""

import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
SENTENCE_END = re.compile(r"[.!?][)\"]?(?= [A-Z(]|$)")
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


def faults(row: list[str]) -> list[str]:
    """Return what is wrong with the row of a term."""
    if len(row) != 4:
        return [f"{len(row)} columns"]
    term, meaning, place, elsewhere = row
    found = ["no term"] * (not term)
    found += ["not one sentence"] * (len(SENTENCE_END.findall(meaning)) != 1 or not meaning.endswith((".", ".)")))
    found += ["no place"] * ("`" not in place)
    return found + ["no usual word"] * (not re.search(r"\w", elsewhere))


def test_terms_are_complete() -> None:
    assert [(row[0], wrong) for row in rows(TEXT, "lives in") if (wrong := faults(row))] == []


def test_incomplete_terms_are_found() -> None:
    good = ["lane", "Connection of a link, e.g. for tensors of 3.5 MB.", "`csrc/core`", "stripe (MPTCP)"]
    assert faults(good) == []
    assert faults(good[:3]) == ["3 columns"]
    for at, value, fault in (
        (0, "", "no term"),
        (1, "", "not one sentence"),
        (1, "No end", "not one sentence"),
        (1, "One sentence. Another one.", "not one sentence"),
        (2, "", "no place"),
        (3, "", "no usual word"),
        (3, "-", "no usual word"),
    ):
        assert faults([*good[:at], value, *good[at + 1 :]]) == [fault]

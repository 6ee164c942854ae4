"""Terms of the glossary are unique, and its present names exist.

test_paths.py checks its paths.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
TEXT = (REPO / "GLOSSARY.md").read_text()
CODE = re.compile(r"`([^`]+)`")


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


def missing_names(text: str) -> list[str]:
    """Return the names of the last table that no source file has."""
    names = {name for row in rows(text, "formerly") for name in CODE.findall(row[1])}
    command = ["git", "grep", "--untracked", "-hwoE", "|".join(sorted(names)), "--", "src", "csrc", "tests"]
    found = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False).stdout.split()
    return sorted(names - set(found))


def test_there_are_terms() -> None:
    assert len(list(rows(TEXT, "lives in"))) > 50
    assert len(list(rows(TEXT, "formerly"))) > 20


def test_terms_have_one_row() -> None:
    terms = [row[0] for row in rows(TEXT, "lives in")]
    assert len(terms) == len(set(terms))


def test_present_names_exist() -> None:
    assert missing_names(TEXT) == []


def test_a_missing_name_is_found() -> None:
    gone = "Removed" + "FromTheCode"
    table = f"| formerly | now |\n|---|---|\n| x | `{gone}`, `assert_quiescent` |\n"
    assert missing_names(table) == [gone]

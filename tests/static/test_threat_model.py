"""Each claim of the threat model names tests, and the tests exist."""

import ast
import re

import documents
import pytest

SECURITY = (documents.REPO / "SECURITY.md").read_text()
UNCHECKED = "(can "  # what an attacker can do


def rows(text: str) -> list[tuple[str, str]]:
    """Return claims and tests of the table under "Threat model"."""
    section = text.partition("## Threat model")[2].partition("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [(row[-2].strip(), row[-1].strip(" |")) for row in cells[2:]]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return the tests in a cell as file and name; the name is empty for a whole file."""
    found: list[tuple[str, str]] = []
    for term in re.findall(r"`([^`]+)`", cell):
        if "/" in term:
            found.append((term, ""))
        elif found[-1][1]:
            found.append((found[-1][0], term))
        else:
            found[-1] = (found[-1][0], term)
    return found


def has_test(file: str, name: str) -> bool:
    """Return whether a file has a test."""
    path = documents.REPO / file
    if not path.is_file():
        return False
    text = path.read_text()
    if path.suffix == ".py":
        return not name or any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(text).body)
    return not name or re.search(rf"^CASE\w*\({re.escape(name)}\)", text, re.MULTILINE) is not None


def test_the_table_is_found() -> None:
    assert len(rows(SECURITY)) > 20


@pytest.mark.parametrize(("claim", "cell"), [row for row in rows(SECURITY) if not row[0].startswith(UNCHECKED)])
def test_each_claim_has_tests_that_exist(claim: str, cell: str) -> None:
    tests = named_tests(cell)
    assert tests, claim
    assert [test for test in tests if not has_test(*test)] == []


def test_a_missing_test_is_found() -> None:
    assert not has_test("tests/security/test_encryption.py", "test_of_nothing")
    assert not has_test("tests/security/no_such_file.py", "")
    assert not has_test("csrc/tests/engine_sessions_test.cc", "no_such_case")
    assert named_tests("`a/b.py` `f`, `g`, `c/d.cc`") == [("a/b.py", "f"), ("a/b.py", "g"), ("c/d.cc", "")]

"""The table of faults is complete, and its tests exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from rows import FAULTS, ROWS, SESSIONS, Row
from scenario_rows import SCENARIO_ROWS, SCENARIOS

ALL = ROWS + SCENARIO_ROWS
REPO = Path(__file__).resolve().parents[2]


@cache
def cases_of(file: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    if file.endswith(".cc"):
        return frozenset(
            re.findall(r"^(?:SLOW_)?CASE\((\w+)\)", (REPO / "csrc/tests" / file).read_text(), re.MULTILINE)
        )
    module = ast.parse((REPO / "tests" / file).read_text())
    return frozenset(node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def expected_failures(source: str) -> frozenset[str]:
    """Return the names of the tests of a file that are marked, or call, `xfail`."""
    module = ast.parse(source)
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = "".join(ast.unparse(node) for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign))
    everything = re.search(r"pytestmark.*xfail", marks) is not None
    return frozenset(test.name for test in tests if everything or "xfail" in ast.unparse(test))


@cache
def expected_failures_of(file: str) -> frozenset[str]:
    return frozenset() if file.endswith(".cc") else expected_failures((REPO / "tests" / file).read_text())


@pytest.mark.parametrize("row", ALL, ids=[row.number for row in ALL])
def test_each_fault_has_tests_that_exist(row: Row) -> None:
    assert bool(row.tests) != bool(row.pending)
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in cases_of(file), test
        assert name not in expected_failures_of(file), f"{test} is expected to fail"


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.xfail\ndef test_a(): pass",
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.xfail)])\ndef test_a(x): pass",
        "def test_a():\n    pytest.xfail('later')",
        "pytestmark = [pytest.mark.slow, pytest.mark.xfail]\ndef test_a(): pass",
    ],
)
def test_tests_that_are_expected_to_fail_are_found(source: str) -> None:
    assert expected_failures(source) == {"test_a"}
    assert expected_failures("def test_b(): pass") == frozenset()


def numbers_of_scenarios() -> set[str]:
    return {f"K{section}.{number + 1}" for section, count in enumerate(SCENARIOS, 1) for number in range(count)}


def test_no_fault_is_missing() -> None:
    numbers = [row.number for row in ALL]
    assert len(numbers) == len(set(numbers))
    assert {row.number for row in SCENARIO_ROWS} == numbers_of_scenarios()
    assert {f"S1.{number + 1}" for number in range(SESSIONS)} <= set(numbers)
    assert {f"F{number + 1}" for number in range(FAULTS)} <= set(numbers)


def test_each_test_of_this_folder_is_in_the_table() -> None:
    named = {test for row in ALL for test in row.tests}
    files = sorted((REPO / "tests" / "faults").glob("test_*.py"))
    found = {
        f"faults/{file.name}::{name}"
        for file in files
        if file.name != Path(__file__).name
        for name in cases_of(f"faults/{file.name}")
        if name.startswith("test_")
    }
    assert found == {test for test in named if test.startswith("faults/")}

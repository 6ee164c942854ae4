"""The page on reliability: how often each fault is tried."""

from bench.reliability.__main__ import by_fault, by_folder
from bench.reliability.page import faults

CASES = [
    "tests/failures/test_user_errors.py::test_one",
    *(f"tests/groups/test_joining.py::test_ids_are_not_used_again[{n}]" for n in range(3)),
]


def test_a_fault_is_tried_in_each_case_of_its_tests() -> None:
    rows = {number: cases for number, _, cases in by_fault(CASES)}
    assert rows["S1.2"] == 3
    assert "| S1.2 | an id is used again | 3 |" in faults(by_fault(CASES))


def test_cases_by_folder() -> None:
    assert by_folder(CASES)["tests/groups"] == 3
    assert by_folder(CASES)["tests/security"] == 0

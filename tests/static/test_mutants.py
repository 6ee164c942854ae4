"""The tables of mutants name rules and tests that exist."""

from pathlib import Path

import mutants
import pytest

SUITES = {suite.name: suite for suite in (make(Path()) for make in mutants.SUITES)}


@pytest.mark.parametrize("name", SUITES)
def test_rules_and_tests_exist(name: str) -> None:
    suite = SUITES[name]
    for mutant in mutants.load(suite):
        text = (mutants.ROOT / suite.sources / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old, mutant.name
        test = f"csrc/tests/{mutant.test}.cc" if name == "core" else f"tests/{mutant.test}"
        assert (mutants.ROOT / test).exists(), mutant.name

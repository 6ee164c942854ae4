"""Programs that exit while daemon threads or handlers are in Telegrad."""

import subprocess
import sys
from pathlib import Path

import pytest
from exiting_program import DURING_THE_END, LEFT_BEHIND, ROUNDS

PROGRAM = Path(__file__).with_name("exiting_program.py")
TIMEOUT = 300.0  # s


def assert_clean_exits(count: int, *cases: str) -> None:
    command = [sys.executable, str(PROGRAM), str(count), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "{}\n", f"children by case and exit status: {done.stdout}{done.stderr[-4000:]}"


def test_a_few_exits() -> None:
    assert_clean_exits(3, "calls", "calls during the end", "passes", "handlers", "callbacks")


@pytest.mark.slow
@pytest.mark.parametrize("what", [*ROUNDS, *LEFT_BEHIND, *DURING_THE_END])
def test_many_exits(what: str) -> None:
    assert_clean_exits(60, what)

"""Programs that exit while daemon threads or handlers are in Telegrad."""

import subprocess
import sys
from pathlib import Path

import pytest
from exiting_program import DURING_THE_END, LEFT_BEHIND, ROUNDS

PROGRAM = Path(__file__).with_name("exiting_program.py")
TIMEOUT = 300.0  # s


def assert_clean_exit(what: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, str(count)], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout == "{}\n", f"children by exit status: {done.stdout}{done.stderr[-4000:]}"


@pytest.mark.parametrize("what", ["calls", "calls during the end", "passes", "handlers", "callbacks"])
def test_a_few_exits(what: str) -> None:
    assert_clean_exit(what, 6)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*ROUNDS, *LEFT_BEHIND, *DURING_THE_END])
def test_many_exits(what: str) -> None:
    assert_clean_exit(what, 60)

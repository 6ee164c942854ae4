"""Programs that end while daemon threads of theirs, and handlers, are in Telegrad: none of them aborts."""

import subprocess
import sys
from pathlib import Path

import pytest
from ending import DURING_THE_END, LEFT_BEHIND, ROUNDS

PROGRAM = Path(__file__).with_name("ending.py")
PATIENCE = 300.0  # s


def ends_well(what: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, str(count)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == "{}\n", f"children by exit status: {done.stdout}{done.stderr[-4000:]}"


@pytest.mark.parametrize("what", ["calls", "calls during the end", "passes", "handlers", "callbacks"])
def test_a_few_ends(what: str) -> None:
    ends_well(what, 6)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*ROUNDS, *LEFT_BEHIND, *DURING_THE_END])
def test_many_ends(what: str) -> None:
    ends_well(what, 60)

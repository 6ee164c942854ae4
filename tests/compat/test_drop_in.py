"""An unmodified program, run by the command, in all its processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_typical_program(tmp_path: Path, start: str) -> None:
    done = run("-m", "telegrad", "run", "--drop-in", str(PROGRAMS / "typical.py"), start, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        expected = rf"worker{rank} ran on telegrad\S*; worker{(rank + 1) % 3} on telegrad"
        assert re.search(expected, done.stdout), done.stdout


@pytest.mark.slow
def test_typical_program_runs_over_torch(tmp_path: Path) -> None:
    done = run(str(PROGRAMS / "typical.py"), "fork", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran on torch.distributed.rpc") == 3

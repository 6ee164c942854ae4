"""Compare distributed autograd with torch's only: `python bench/autograd.py`.

It has the options of `python -m bench`. With `--check` it measures one row: the backward pass of a graph of 500 nodes
that work (batch 64, width 512). It exits with 1 if Telegrad's overhead exceeds its share.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = ("--only", "autograd", "--only", "training", "--competitors", "telegrad,torch")
CHECKED = ("--only", "500 nodes that work", "--competitors", "telegrad")


def bench(*arguments: str) -> int:
    return subprocess.call([sys.executable, "-m", "bench", *arguments], cwd=Path(__file__).parent.parent)


def check(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if status := bench(*CHECKED, *arguments, "--out", folder):
            return status
        (row,) = json.loads(Path(folder, "results.json").read_text())["rows"]
    verdicts = [goal["met"] for goal in row["goals"]]
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(check([one for one in given if one != "--check"]) if "--check" in given else bench(*ROWS, *given))

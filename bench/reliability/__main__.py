"""Measure how fast faults are noticed, and write docs/reliability.md."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from bench.machine import machine
from bench.reliability.detection import MEASUREMENTS, measure
from bench.reliability.page import page

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/failures", "tests/faults", "tests/groups", "tests/protocols", "tests/security")

REPORTS = ("fast.xml", "slow.xml")
ROW_CHECKS = "faults/test_rows.py"  # they inject no fault


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def passed(results: Path) -> list[str]:
    """Return the test cases that have passed, as pytest names them, once for each run.

    Args:
        results: Folder with the reports of `make test-python` and `make test-slow`.

    Raises:
        SystemExit: One of the reports is missing.
    """
    if missing := [name for name in REPORTS if not (results / name).exists()]:
        sys.exit(f"{results} has no {' and no '.join(missing)}: run `make test-python` and `make test-slow` first")
    cases = [case for report in results.glob("*.xml") for case in ET.parse(report).iter("testcase")]
    names = [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in cases if not len(case)]
    return [name for name in names if ROW_CHECKS not in name]


def by_folder(cases: Sequence[str]) -> dict[str, int]:
    """Return the number of passed test cases in each folder."""
    return {folder: sum(case.startswith(f"{folder}/") for case in cases) for folder in FOLDERS}


def by_fault(cases: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return each row of `tests/faults/rows.py`: number, fault, passed test cases.

    A test counts with all of its parameters and in each run, a test of the core once.
    """
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    rows: Any = import_module("scenario_rows")
    counts = Counter(case.removeprefix("tests/").partition("[")[0] for case in cases)
    return [
        (row.number, row.fault, sum(1 if ".cc::" in test else counts[test] for test in row.tests))
        for row in (*import_module("rows").ROWS, *rows.SCENARIO_ROWS)
    ]


def explore(figures: Path) -> dict[str, int]:
    """Run the slow explorers; return the schedules of each."""
    figures.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow",
        "-k",
        "schedules",
        "--timeout",
        "900",
        "tests/protocols",
    ]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "TELEGRAD_FIGURES": str(figures)})
    found: Counter[str] = Counter()
    for line in figures.read_text().splitlines():
        row = json.loads(line)
        found[row["explorer"]] += row["schedules"]
    return dict(sorted(found.items()))


def loaded(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.reliability", description=__doc__.partition(":")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder with the figures of other commands")
    parser.add_argument("--rounds", type=int, help="of each measurement; by default as many as its figure needs")
    parser.add_argument("--no-schedules", action="store_true", help="take the explored schedules of the last run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability.md")
    args = parser.parse_args()
    build = args.build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    about, at, cases = machine(), commit(), passed(build / "results")
    kept = loaded(build / "reliability.json") or {}
    figures = {
        "machine": about,
        "commit": at,
        "detection": measure(args.rounds),
        "soak": loaded(build / "soak.json"),
        "fuzzing": loaded(build / "fuzz" / "fuzz.json"),
        "schedules": kept.get("schedules") if args.no_schedules else explore(build / "schedules.jsonl"),
        "faults": by_fault(cases),
        "tests": by_folder(cases),
    }
    (build / "reliability.json").write_text(json.dumps(figures, indent=1) + "\n")
    args.out.write_text(page(figures))
    for name in MEASUREMENTS:
        print(name, json.dumps(figures["detection"][name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

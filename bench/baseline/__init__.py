"""Baselines of the machine, measured by baseline.cc in the same run."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("baseline.cc")
ROOT = Path(__file__).parents[2]


def program() -> Path:
    """Return the program, compiled if it is missing or out of date."""
    built = ROOT / "build" / "bench" / "baseline"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        built.parent.mkdir(parents=True, exist_ok=True)
        fresh = built.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-O2", "-std=c++20", "-pthread", str(SOURCE), "-o", str(fresh)], check=True)
        fresh.rename(built)
    return built


def measure(*arguments: object, prefix: tuple[str, ...] = ()) -> list[float]:
    """Return the seconds that the program prints."""
    command = [*prefix, str(program()), *(str(argument) for argument in arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=True)
    return [float(line) for line in done.stdout.splitlines()]

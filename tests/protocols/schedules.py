"""Runs of many seeded schedules, and their number for docs/reliability.md."""

import json
import os
from collections.abc import Callable, Iterable

Schedule = Callable[[int], object]


def run_schedules(run: Schedule, seeds: Iterable[int]) -> int:
    """Run `run(seed)` for each seed; return the number of schedules.

    A failure gets a note with the line that repeats its schedule. The number is appended to the file that
    TELEGRAD_FIGURES names, if any, as a line of JSON.
    """
    done = 0
    for seed in seeds:
        try:
            run(seed)
        except Exception as failure:
            line = f"import {run.__module__} as t; t.{run.__name__}({seed})"
            failure.add_note(f'replay in tests/protocols, with PYTHONPATH=.: python -c "{line}"')
            raise
        done += 1
    write_figure(run.__name__, done)
    return done


def write_figure(explorer: str, schedules: int) -> None:
    path = os.environ.get("TELEGRAD_FIGURES")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"explorer": explorer, "schedules": schedules}) + "\n")

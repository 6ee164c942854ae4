"""Only profiles read the wall clock, which may jump."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALL_CLOCKS = re.compile(
    r"\btime\.time(_ns)?\(|\bfrom time import\b.*\btime\b|\bdatetime\.(now|utcnow|today)\b"
    r"|\bfrom datetime import (?!timedelta$)|\bimport datetime\b"
    r"|\blocaltime\(|\bgmtime\(|system_clock|high_resolution_clock|CLOCK_REALTIME|\bgettimeofday\("
    r"|\bstd::time\(|\btime\((nullptr|NULL|0)\)",
    re.MULTILINE,
)


def wall_clocks_in(text: str) -> list[str]:
    return [match.group() for match in WALL_CLOCKS.finditer(text)]


def test_deadlines_and_heartbeats_use_monotonic_clocks() -> None:
    files = [*ROOT.glob("src/telegrad/**/*.py"), *(f for f in ROOT.glob("csrc/*/**/*.*") if f.suffix in (".cc", ".h"))]
    # The events of profiles have the clock of torch's profiler.
    exempt = {"tests", "observe", "profile.py"}
    files = [file for file in files if not exempt & set(file.relative_to(ROOT).parts)]
    assert len(files) > 300
    found = {str(file.relative_to(ROOT)): wall_clocks_in(file.read_text()) for file in files}
    assert {file: uses for file, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "text",
    [
        "x = time.time()",
        "x = time.time_ns()",
        "from time import monotonic, time",
        "datetime.now()",
        "from datetime import datetime",
        "from datetime import datetime, timedelta",
        "const auto t = std::chrono::system_clock::now();",
        "clock_gettime(CLOCK_REALTIME, &t);",
        "std::srand(time(nullptr));",
    ],
)
def test_wall_clocks_are_found(text: str) -> None:
    assert wall_clocks_in(text)


@pytest.mark.parametrize(
    "text",
    ["time.monotonic()", "from datetime import timedelta", "steady_clock::now()", "clock_gettime(CLOCK_MONOTONIC, &t)"],
)
def test_other_clocks_are_allowed(text: str) -> None:
    assert not wall_clocks_in(text)

"""Goals, verdicts and exit status of the bench, from synthetic figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from bench import markdown
from bench.figures import Figure, figure, show, show_rate, show_spread
from bench.row import (
    BASELINE,
    BASELINE_WITH,
    OURS,
    TORCH,
    AtMost,
    Family,
    FasterThan,
    Goal,
    LessOverhead,
    Row,
    WithinBaseline,
)
from bench.schedule import Results
from bench.verdict import RowVerdict, ahead_of_us, failures, row_verdicts

ROOT = Path(__file__).parents[2]


def nothing(*_: object) -> dict[str, list[float]]:
    raise AssertionError("this row is never measured")


def one_row(results: Results, *goals: Goal) -> RowVerdict:
    (row,) = row_verdicts([Family("synthetic", "", (Row("row", nothing, goals=goals),))], results)
    return row


def of(**rounds: list[list[float]]) -> Results:
    return Results({"row": dict(rounds)})


def test_the_median_is_of_rounds_and_the_spread_between_them() -> None:
    found = figure([[1.0, 2.0, 30.0], [4.0], [3.0, 3.0]])
    assert found == Figure(median=3.0, spread=1.0, p99=30.0, samples=6, rounds=(2.0, 4.0, 3.0))


def test_the_spread_of_one_round_is_between_its_quartiles() -> None:
    assert figure([[1.0, 2.0, 3.0, 4.0, 5.0]]).spread == 1.0
    assert figure([[7.0]]).spread == 0.0
    assert figure([[7.0], [7.5]], resolution=1.0).spread == 1.0


def test_p99_leaves_one_in_a_hundred_out() -> None:
    assert figure([[*range(1, 100), 5000]]).p99 == 99
    assert figure([[*range(1, 99), 5000]]).p99 == 5000


@pytest.mark.parametrize(
    ("ours", "theirs", "ahead"),
    [
        ([[10.0], [12.0], [11.0]], [[8.0], [8.0], [8.0]], ["torch"]),  # 3 apart, the spreads are 1
        ([[10.0], [12.0], [11.0]], [[9.0], [11.0], [10.0]], []),  # 1 apart, the spreads are 2
        ([[10.0], [12.0], [11.0]], [[8.0], [10.0], [9.0]], []),  # as far apart as the spreads
        ([[10.0], [12.0], [11.0]], [[20.0], [20.0], [20.0]], []),
    ],
)
def test_a_peer_is_ahead_by_more_than_both_spreads(
    ours: list[list[float]], theirs: list[list[float]], ahead: list[str]
) -> None:
    row = one_row(of(telegrad=ours, torch=theirs))
    assert row.ahead == ahead
    assert len(failures([row])) == len(ahead)


def test_in_a_row_without_verdict_no_peer_is_ahead() -> None:
    families = [Family("synthetic", "", (Row("row", nothing, verdict=False),))]
    (row,) = row_verdicts(families, of(telegrad=[[2.0]], torch=[[1.0]]))
    assert row.ahead == []
    assert RowVerdict.from_json(row.as_json()).ahead == []
    assert markdown.goals(row) == "no verdict"


def test_the_baseline_is_no_competitor() -> None:
    ours, lower = figure([[10.0]]), figure([[1.0]])
    assert ahead_of_us({OURS: ours, BASELINE: lower, BASELINE_WITH + TORCH: lower}) == []
    assert ahead_of_us({OURS: ours, "gRPC": lower, "Ray": lower}) == ["gRPC", "Ray"]
    assert ahead_of_us({"gRPC": lower}) == []


def test_a_failed_row_of_telegrad_fails_the_check() -> None:
    results = of(torch=[[1.0]])
    results.leave_out("row", OURS, "failed: WorkerLost: w1")
    assert failures([one_row(results)]) == ["row: telegrad failed: WorkerLost: w1"]
    results.leave_out("row", OURS, "network namespaces need root")
    assert failures([one_row(results)]) == []


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (FasterThan(5), 5.0, True),
        (FasterThan(5.1), 5.0, False),
        (FasterThan(3, "torch uv"), None, None),
        (WithinBaseline(2), 2.0, True),
        (WithinBaseline(1.9), 2.0, False),
        (AtMost(2.0, "two seconds"), 2.0, True),
        (AtMost(1.9, "1.9 seconds"), 2.0, False),
        (LessOverhead(9), 9.0, True),  # torch adds 10 - 1, Telegrad adds 2 - 1
        (LessOverhead(9.1), 9.0, False),
    ],
)
def test_goals(goal: Goal, value: float | None, met: bool | None) -> None:
    (verdict,) = one_row(of(telegrad=[[2.0]], torch=[[10.0]], baseline=[[1.0]]), goal).verdicts
    assert verdict.met is met
    assert verdict.value == (None if value is None else pytest.approx(value))


def test_torchs_overhead_uses_the_baseline_of_its_own_turns() -> None:
    results = Results({"row": {OURS: [[2.0]], TORCH: [[10.0]], BASELINE: [[1.0]], BASELINE_WITH + TORCH: [[6.0]]}})
    (verdict,) = one_row(results, LessOverhead(4)).verdicts
    assert verdict.value == pytest.approx(4.0)


def test_a_spread_of_many_times_the_median_is_shown_in_its_unit() -> None:
    assert show_spread(figure([[1.0], [2.0], [3.0]]), "s") == "±50%"
    assert show_spread(figure([[0.0]], resolution=0.001), "CPU s") == "±0.001 CPU s"


def test_costs_are_shown_in_their_unit() -> None:
    assert [show(x, "s") for x in (2.5e-6, 25e-6, 0.025, 2.5)] == ["2.50 us", "25.0 us", "25.00 ms", "2.50 s"]
    assert show(1234.5, "MB") == "1,234 MB"
    assert show_rate(0.5, 1e9, "bytes") == "2.00 GB/s"
    assert show_rate(1e-3, 1000, "calls") == "1.00 M/s"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("theirs", "status"), [(0.5, 1), pytest.param(2.0, 0, marks=pytest.mark.slow)])
def test_exit_status_is_1_if_a_competitor_is_ahead(theirs: float, status: int, tmp_path: Path) -> None:
    row = one_row(of(telegrad=[[1.0], [1.1]], torch=[[theirs], [theirs]]), FasterThan(2))
    data = row.as_json() | {"family": "calls", "ahead": []}  # computed again from the figures
    about = {"cpu": "synthetic", "cores": 2, "memory GB": 1, "system": "", "python": "", "packages": {}, "iperf3": None}
    content = {"machine": about | {"load before": 0}, "competitors": [OURS, TORCH], "rows": [data]}
    written = tmp_path / "results.json"
    written.write_text(json.dumps(content))
    tables = tmp_path / "tables.md"
    command = [
        sys.executable,
        "-m",
        "bench",
        "--verdict",
        str(written),
        "--out",
        str(tmp_path),
        "--markdown",
        str(tables),
    ]
    for options, expected in (([], 0), (["--check"], status)):
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == expected, done.stderr
        assert ("torch is" in done.stdout) == (status == 1)
        assert "0 of 1 goals met" in done.stdout
    assert re.search(r"\| row +\| 1.05 s ±5% +\| ", tables.read_text())

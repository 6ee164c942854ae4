"""The bench runs. No test asserts a measured time."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from bench import networks
from bench.__main__ import choose
from bench.processes import descendants, end_with_parent
from bench.row import OURS, TORCH, Family
from bench.rows.networks import NETWORKS
from bench.rows.table import FAMILIES

ROOT = Path(__file__).parents[2]


def run_module(name: str, *args: str, seconds: float = 550) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.timeout(600)  # half a minute where nothing else runs
@pytest.mark.parametrize(
    ("only", "competitors"),
    [
        (["calls", "startup"], (OURS,)),
        pytest.param([], (OURS,), marks=pytest.mark.slow),
        pytest.param([], (OURS, TORCH), marks=pytest.mark.slow),
    ],
)
def test_a_quick_run_measures_every_quick_row(tmp_path: Path, only: list[str], competitors: tuple[str, ...]) -> None:
    chosen = [choose(family, only, quick=True) for family in FAMILIES]
    options = [word for text in only for word in ("--only", text)]
    result = run_module("bench", "--quick", *options, "--competitors", ",".join(competitors), "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "results.json").read_text())
    rows = {row["row"]: row for row in written["rows"]}
    assert list(rows) == [row.name for family in chosen for row in family.rows]
    no_networks = networks.missing()
    for name, row in rows.items():
        assert name in result.stdout
        if no_networks and row["family"] == NETWORKS.name:
            assert row["absent"][OURS] == no_networks
        else:
            assert row["figures"][OURS]["samples"] > 0, row["absent"]
            assert all(
                competitor in row["figures"] or not row["absent"][competitor].startswith("failed")
                for competitor in competitors
            ), row
    for family in {row["family"] for row in rows.values() if row["figures"]}:
        for kind in ("png", "svg"):
            assert list(tmp_path.glob(f"{family}*.{kind}"))
    assert "at most 4 x the baseline" in result.stdout


def test_unknown_rows_and_competitors_are_rejected() -> None:
    assert run_module("bench", "--only", "no such row").returncode == 2
    assert run_module("bench", "--competitors", "unknown").returncode == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_bench(number: int, tmp_path: Path) -> None:
    row = ["--only", "an idle minute", "--full"]  # runs for minutes
    command = [sys.executable, "-m", "bench", *row, "--competitors", OURS, "--out", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as bench:
        while len(started := descendants(bench.pid)) < 3:  # the leader and two workers
            assert bench.poll() is None, log.read_text()
        ends = [os.pidfd_open(pid) for pid in started]
        bench.send_signal(number)
        bench.wait(30)
    try:
        for pid, end in zip(started, ends, strict=True):
            assert select.select([end], [], [], 20)[0], f"process {pid} still runs"
    finally:
        for pid, end in zip(started, ends, strict=True):
            if not select.select([end], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(end)


def test_child_of_an_ended_parent_exits() -> None:
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    child = os.fork()
    if child == 0:
        end_with_parent(ended)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.timeout(120)
def test_memory_has_verdicts_for_both_processes(tmp_path: Path) -> None:
    written = tmp_path / "memory.json"
    result = run_module("bench.endurance.memory", "--calls", "500", "--pause", "0.1", "--json", str(written))
    assert written.exists(), result.stderr
    figures = json.loads(written.read_text())
    assert result.returncode == (0 if figures["met"] else 1), result.stderr
    assert set(figures["processes"]) == {"client", "server"}
    assert result.stdout.count("threads") == 2


@pytest.mark.timeout(120)
def test_contexts_has_verdicts_for_both_processes(tmp_path: Path) -> None:
    written = tmp_path / "contexts.json"
    result = run_module("bench.endurance.contexts", "--count", "300", "--json", str(written))
    assert written.exists(), result.stderr
    figures = json.loads(written.read_text())
    assert result.returncode == (0 if figures["good"] else 1), result.stderr
    assert set(figures["contexts"]) == {"client", "server"}


@pytest.mark.timeout(120)
def test_optimizer_prints_all_documented_rows() -> None:
    result = run_module("bench.endurance.optimizer", "--repeats", "3")
    assert result.returncode == 0, result.stderr
    for row in (
        "the run of a handler",
        "an operation that saves two tensors",
        "a step of Adam",
        "all in use by others",
    ):
        assert row in result.stdout


def test_family_names_are_unique() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(isinstance(family, Family) for family in FAMILIES)

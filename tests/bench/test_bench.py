"""The benchmarks run, so that they cannot rot. What they measure is asserted nowhere: that is for people to read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

BENCH = Path(__file__).parents[2] / "bench"


def run_bench(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(120)  # two groups, each of whose processes imports torch
def test_latency_measures_every_row_of_both_packages(tmp_path: Path) -> None:
    written = tmp_path / "new" / "latency.json"
    result = run_bench("latency.py", "--quick", "--json", str(written))
    assert result.returncode == 0, result.stderr
    rows = json.loads(written.read_text())["results"]
    assert len(rows) == 10
    for row in rows:
        assert row["row"] in result.stdout
        assert row["torch"]["samples"] == row["telegrad"]["samples"] == 3
        assert row["ratio"] == pytest.approx(row["torch"]["median"] / row["telegrad"]["median"])


@pytest.mark.timeout(120)
def test_latency_measures_the_rows_asked_for() -> None:
    result = run_bench("latency.py", "--quick", "--only", "telegrad", "-k", "int")
    assert result.returncode == 0, result.stderr
    assert "identity, int" in result.stdout
    assert "4 MB" not in result.stdout
    assert run_bench("latency.py", "-k", "no such row").returncode == 2


@pytest.mark.timeout(120)
def test_autograd_measures_steps_beside_their_like_and_trainers_together(tmp_path: Path) -> None:
    written = tmp_path / "autograd.json"
    arguments = ("--quick", "-k", "2 trainers, batch 1", "-k", "over a call", "-k", "100 nodes")
    result = run_bench("autograd.py", *arguments, "--json", str(written))
    assert result.returncode == 0, result.stderr
    figures = json.loads(written.read_text())
    call, nodes = figures["results"]
    (trainers,) = figures["trainers"]
    for package in ("torch", "telegrad"):
        assert call[package]["samples"] == 3
        assert nodes[package]["added"] < nodes[package]["median"]
        assert trainers[package]["samples per second"] > 0
    assert trainers["telegrad"]["steps failed"] == 0
    for row in (call, nodes, trainers):
        assert row["row"] in result.stdout
    assert run_bench("autograd.py", "-k", "no such row").returncode == 2


@pytest.mark.timeout(120)
def test_autograd_judges_our_share_and_memory(tmp_path: Path) -> None:
    written = tmp_path / "autograd.json"
    result = run_bench("autograd.py", "--check", "--quick", "--json", str(written))
    figures = json.loads(written.read_text())
    assert result.returncode == (0 if figures["good"] else 1), result.stderr
    (row,) = figures["results"]
    assert figures["good"] == (row["telegrad"]["share"] <= 0.1)
    assert figures["trainers"] == []
    result = run_bench("autograd.py", "--contexts", "300", "--json", str(written))
    figures = json.loads(written.read_text())
    assert result.returncode == (0 if figures["good"] else 1), result.stderr
    assert set(figures["contexts"]) == {"client", "server"}


def test_memory_judges_both_processes(tmp_path: Path) -> None:
    written = tmp_path / "memory.json"
    result = run_bench("memory.py", "--calls", "500", "--pause", "0.1", "--json", str(written))
    figures = json.loads(written.read_text())
    assert result.returncode == (0 if figures["met"] else 1), result.stderr
    assert set(figures["processes"]) == {"client", "server"}
    assert result.stdout.count("threads") == 2


@pytest.mark.timeout(120)
def test_optimizer_measures_all_that_the_documents_say() -> None:
    result = run_bench("optimizer.py")
    assert result.returncode == 0, result.stderr
    for row in (
        "the run of a handler",
        "an operation that saves two tensors",
        "a step of Adam",
        "all in use by others",
    ):
        assert row in result.stdout

"""`telegrad demo` runs the example programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.cli import demo

EXAMPLES = Path(__file__).parents[2] / "examples"


def telegrad(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "telegrad", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


def test_help_lists_every_example(tmp_path: Path) -> None:
    shown = telegrad("demo", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for name in ("cartpole", *(path.stem for path in EXAMPLES.glob("*.py"))):
        assert f"\n  {name} " in shown.stdout


def test_an_unknown_name_is_refused_with_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["pipe"])
    assert "there is no example 'pipe'; choose one of batched_parameter_server, " in capsys.readouterr().err


def test_missing_packages_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.NEEDED, "no_such_module", "no-such-distribution")
    with pytest.raises(SystemExit):
        demo.main([])
    assert "the examples need no-such-distribution: pip install 'telegrad[examples]'" in capsys.readouterr().err


@pytest.mark.timeout(120)  # two processes, each of which imports torch
def test_an_example_runs_with_its_own_options_and_leaves_its_figure_here(tmp_path: Path) -> None:
    for package in ("gymnasium", "matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    shown = telegrad("demo", "profile_step", "--smoke", "--steps", "1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "\nReached: " in shown.stdout
    assert (tmp_path / "telegrad-demo" / "profile_step.png").exists()

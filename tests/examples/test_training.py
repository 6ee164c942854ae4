"""Runs of the training examples, short in `make test`, full in `make test-slow`."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from example_helpers import import_module
from free_ports import free_port

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))
QUICK = ("language_model", "pipeline")  # the command runs profile_step (tests/cli), a terminal the parameter server
PNG = b"\x89PNG\r\n\x1a\n"

Program = subprocess.Popen[str]
Start = Callable[..., Program]

pytestmark = pytest.mark.timeout(200)  # up to six processes, each of which imports torch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an example with its figure in `tmp_path / "new"`; end it after the test."""
    started: list[Program] = []

    def start(name: str, *args: str) -> Program:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        started.append(
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(tmp_path / "new"), *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment | {"PYTHONFAULTHANDLER": "1", "MASTER_PORT": str(free_port())},
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for program in started:
        signal_all(program, signal.SIGKILL)
        program.wait()


@pytest.fixture(scope="module")
def view() -> ModuleType:
    return import_module("example_view", EXAMPLES / "common" / "view.py")


def signal_all(program: Program, number: signal.Signals) -> None:
    """Send a signal to a program and its processes."""
    try:
        os.killpg(program.pid, number)
    except ProcessLookupError:
        pass


def ending(program: Program, timeout: float = 150) -> tuple[str, str]:
    """Return output and errors of a program; show all stacks if it does not end."""
    try:
        return program.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        signal_all(program, signal.SIGABRT)
        out, err = program.communicate()
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")


def output_of_success(program: Program, timeout: float = 150) -> str:
    """Return the output of a program that ended well, without lost workers."""
    out, err = ending(program, timeout)
    assert program.returncode == 0, out + err
    assert "Traceback" not in err
    assert "lost" not in err
    return out


def test_seven_examples_exist() -> None:
    assert len(NAMES) == 7


@pytest.mark.parametrize("name", NAMES)
def test_fits_on_a_few_screens(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 160


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_smoke(name: str, start: Start, tmp_path: Path) -> None:
    out = output_of_success(start(name, "--smoke"))
    assert "\nReached: " in out
    assert "as fast" not in out  # a few cold steps do not show the speed
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(PNG)
    assert (tmp_path / "new" / f"{name}.svg").read_text().startswith("<?xml")


def test_one_process_per_terminal(start: Start) -> None:
    """Start the parameter server as PyTorch's tutorial does: one command per process."""
    group = ["--world_size=3", "--num_gpus=0", "--master_addr=localhost", f"--master_port={free_port()}", "--smoke"]
    server, *trainers = [start("parameter_server", *group, f"--rank={rank}") for rank in range(3)]
    for rank, trainer in enumerate(trainers, 1):
        assert f"Rank {rank} epoch 1 batch 0 loss" in output_of_success(trainer)
    assert "\nReached: " in output_of_success(server)


@pytest.mark.slow
def test_a_missed_claim_is_reported(start: Start) -> None:
    program = start("batched_parameter_server", "--trainers", "2", "--updates", "1")
    out, err = ending(program)
    assert program.returncode == 1, out + err
    assert "\nNOT REACHED: accuracy" in out
    assert "Traceback" not in err


def test_a_score_is_reached_only_above_the_trivial_guess(view: ModuleType) -> None:
    assert view.Score(accuracy=0.30, goal=0.25, guess=0.20).reached
    assert not view.Score(accuracy=0.30, goal=0.25, guess=0.30).reached
    assert not view.Score(accuracy=0.30, goal=0.35, guess=0.20).reached


def test_a_panel_without_values_disappears_and_a_single_value_is_visible(view: ModuleType) -> None:
    _, (empty, single) = view.new_figure("", panels=2)
    view.curves(empty, {"nothing": []}, "", "")
    view.curves(single, {"one": [1.0]}, "", "")
    assert not empty.get_visible()
    assert single.get_visible()
    assert single.lines[0].get_marker() == "o"


def test_a_terminal_shows_workers_rates_and_time_left(view: ModuleType) -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=100, file=io.StringIO())
    shown = view.View("A run", 10, "batches", console=console)
    with shown:
        shown.worker("trainer 1", "training, epoch 2", loss="0.5")
        shown.row(epoch="2", test_loss="0.7")
        with console.capture() as captured:
            console.print(shown.panel())
    text = captured.get()
    for part in ("A run", "trainer 1", "training, epoch 2", "0.5", "test loss", "0.7", "1/10", "batches/s", "left"):
        assert part in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_in_full(name: str, start: Start) -> None:
    assert "\nReached: " in output_of_success(start(name), timeout=550)
